"""The functions that a policy may hold: they turn arrays into arrays and do nothing else.

A file says which functions a network calls, and on what. So whatever reads or writes files, changes
settings, calls back or looks into memory is left out. What a version of JAX lacks is passed over.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.nn import initializers

_ACTIVATIONS = """
    celu dot_product_attention elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity
    leaky_relu log1mexp log_sigmoid log_softmax logmeanexp logsumexp mish one_hot relu relu6 selu
    sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize swish
    tanh
"""
# Of several names of a function, the first is the one that is written.
_NAMES: Mapping[ModuleType, str] = {
    jax.nn: _ACTIVATIONS,
    jnp: """
        abs absolute acos acosh add all amax amin angle any append arange arccos arccosh arcsin
        arcsinh arctan arctan2 arctanh argmax argmin argsort around asin asinh astype
        atan atan2 atanh atleast_1d atleast_2d atleast_3d average bitwise_and bitwise_invert
        bitwise_not bitwise_or bitwise_xor broadcast_arrays broadcast_to cbrt ceil clip
        column_stack concat concatenate conj conjugate convolve copysign correlate cos cosh
        count_nonzero cross cumprod cumsum cumulative_prod cumulative_sum deg2rad degrees diag
        diagonal diff divide dot dstack einsum equal exp exp2 expand_dims expm1 fabs flip fliplr
        flipud float_power floor floor_divide fmax fmin fmod full_like greater greater_equal
        heaviside hstack hypot i0 imag inner interp invert isclose isfinite isinf isnan kron less
        less_equal linspace log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
        logical_or logical_xor matmul matrix_transpose matvec max maximum mean median min minimum
        mod moveaxis multiply nan_to_num nanmax nanmean nanmin nanstd nansum nanvar negative
        not_equal ones_like outer permute_dims polyval positive pow power prod ptp rad2deg radians
        ravel real reciprocal remainder repeat reshape rint roll rot90 round select sign signbit
        sin sinc sinh sort split sqrt square squeeze stack std subtract sum swapaxes take
        take_along_axis tan tanh tensordot tile trace transpose tril triu true_divide trunc unstack
        unwrap var vdot vecdot vecmat vstack where zeros_like
    """,
    nnx: f"""
        {_ACTIVATIONS} avg_pool combine_masks make_attention_mask make_causal_mask max_pool min_pool
    """,
    dtypes: "promote_dtype",
    jax.lax: """
        abs acos acosh add asin asinh atan atan2 atanh batch_matmul bessel_i0e bessel_i1e
        broadcast broadcast_in_dim cbrt ceil clamp collapse concatenate conv conv_general_dilated
        conv_transpose conv_with_general_padding convert_element_type cos cosh cumlogsumexp cummax
        cummin cumprod cumsum digamma div dot dot_general erf erf_inv erfc exp exp2 expand_dims
        expm1 floor integer_pow is_finite lgamma log log1p logistic max min mul neg pad pow
        reciprocal reduce_max reduce_min reduce_prod reduce_sum rem reshape rev round rsqrt select
        select_n sign sin sinh sort sqrt square squeeze stop_gradient sub tan tanh tile top_k
        transpose
    """,
    initializers: "ones zeros",
}


@functools.cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module, listed in _NAMES.items():
        for name in listed.split():
            if hasattr(module, name):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    return found


@functools.cache
def names() -> Mapping[int, str]:
    """Return the name of each function by its identity."""
    found: dict[int, str] = {}
    for name, function in functions().items():
        found.setdefault(id(function), name)
    return found
