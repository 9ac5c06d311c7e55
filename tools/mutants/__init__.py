"""Whether the tests notice a mistake: small changes of the package, one at a time, and the tests that run what changed.

| file           | what lives there                                                                |
|----------------|---------------------------------------------------------------------------------|
| `operators.py` | the changes: which there are in a source, and the source with one of them made |
| `blocks.py`    | the blocks of a source, and the source with a probe in each                     |
| `probe.py`     | what a probe calls, and which test is running: a plugin of pytest               |
| `cover.py`     | which tests run which blocks                                                    |
| `copies.py`    | copies of a checkout, and pytest in one                                         |
| `play.py`      | one mutant against its tests, and many of them                                  |
"""
