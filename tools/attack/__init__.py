"""An attack on the package: random cases with a seed each, run on real ranks and judged by plain arithmetic.

| kind       | what is tried                                            | module        |
|------------|----------------------------------------------------------|---------------|
| specs      | trees, placements, precisions, schedules, programs        | specs.py      |
| driven     | models and programs by `T.forward_backward`              | driven.py     |
| functions  | functions of torch.autograd that are given weights       | functions.py  |
| objects    | weights and settings in nests of objects                 | objects.py    |
| buffers    | buffers that ranks share, and checkpoints of them         | buffers.py    |
| interrupts | an exception or SIGINT at a random place, then again      | interrupts.py |
| kills      | SIGKILL of a rank, or of the process that launched them   | kills.py      |
| files      | damaged, swapped and crafted checkpoints, many writers    | files.py      |
| differ     | ranks that differ in one setting, value or order          | differ.py     |

A case is a plain value (dicts, lists, numbers), drawn from `kind:seed:index`, so that it can be printed, shrunk and run
alone. `harness.py` runs cases on ranks under a watchdog, `players.py` does so on several processes, `verdict.py` has
what can come out. Nothing here relies on more than the public names of the package, so that an older one can be
attacked too.
"""
