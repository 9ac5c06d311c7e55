"""Codecs that are ready, and weights that other packages have packed, taken over.

    nf4          4 bits an element, blocks of 64, as QLoRA and bitsandbytes have it; scales may be packed, too
    int4         4 bits, whole numbers from -7 to 7, a maximum a block
    int8         8 bits, a scale a row, as LLM.int8; or a scale a block
    fp8_block    float8, a float32 scale a block of 256, or a tile of a matrix
    dynamic8     8 bits by a codebook over seven decades, a maximum a block: for moments of optimizers
    mxfp8        float8, a power of 2 for 32 elements: the Open Compute Project's microscaling format

What a codec is stands in `_spec/precision.py`, which the core knows. The core knows none of these.
"""

from .._spec.precision import Form

__all__ = ["Form"]
