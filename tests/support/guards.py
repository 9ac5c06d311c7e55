"""Imported: Dynamo does not time a graph's guards, for a log, which flushes the processor's caches: 20 ms a graph."""

import torch._dynamo.guards as guards

guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
