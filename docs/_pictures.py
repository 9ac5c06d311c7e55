"""Pictures."""


def drawn():
    return {}
