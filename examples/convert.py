"""Weights from one kind of files into another, without GPUs and without other ranks. The same as

python -m functional_fsdp.convert

python examples/convert.py global_step100                                         what lies there, as a table
python examples/convert.py global_step100 checkpoints/step_100                    DeepSpeed, with its moments
python examples/convert.py fsdp2-checkpoint checkpoints/step_0                    what torch's FSDP2 saved by DCP
python examples/convert.py checkpoints/step_100 llama-tuned --dtype bfloat16      a checkpoint -> safetensors
python examples/convert.py mixtral checkpoints/step_0 --config mixtral            files that cut leaves otherwise
python examples/convert.py checkpoints/step_9 mixtral-tuned --config mixtral      and back, as transformers has them
"""

from __future__ import annotations

from functional_fsdp.convert import main

__all__ = ["main"]

if __name__ == "__main__":
    print(main())
