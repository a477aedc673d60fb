"""Fused attention and normalization, forward and backward, for CUDA and the CPU.

``__all__`` is the versioned interface. The private names imported here are FlashAttention-2's,
which other libraries reach for; they keep their signatures too.
"""

from . import layers
from .attention import flash_attn_func, flash_attn_varlen_func
from .attention_op import check_inputs
from .attention_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .attention_private import (
    _flash_attn_backward,  # noqa: F401
    _flash_attn_forward,  # noqa: F401
    _flash_attn_varlen_backward,  # noqa: F401
    _flash_attn_varlen_forward,  # noqa: F401
    _wrapped_flash_attn_backward,  # noqa: F401
    _wrapped_flash_attn_forward,  # noqa: F401
)
from .kvcache import flash_attn_with_kvcache
from .norms import layer_norm, rms_norm

__all__ = [
    "check_inputs",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "layer_norm",
    "layers",
    "rms_norm",
]
