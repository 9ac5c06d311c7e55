"""The command: `python -m functional_fsdp.convert`."""

from __future__ import annotations

from .._common.errors import FsdpError
from . import main

if __name__ == "__main__":
    try:
        print(main())
    except (FsdpError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
