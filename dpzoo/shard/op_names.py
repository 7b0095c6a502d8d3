"""Which functions belong to which class: pointwise, native, refused. By name, for a function has many spellings."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Metadata, autograd bookkeeping, casts and views: right as C++ does them, given the dispatch door below.
NATIVE_NAMES = _words(
    """
    __get__ __set__ __delete__ __dir__ __dlpack_device__ _dirty _is_view _version H T adjoint alias bfloat16 bool
    broadcast_to byte can_cast cdouble cfloat char clone contiguous cpu cuda detach double element_size empty_like
    expand expand_as float full_like get_device half has_names int is_complex is_conj is_contiguous is_cpu is_cuda
    is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_sparse lift_fresh long
    mH mT moveaxis movedim ndimension nelement
    new_empty new_empty_strided new_full new_ones new_zeros ones_like permute promote_types register_hook
    register_post_accumulate_grad_hook requires_grad_ resolve_conj resolve_neg result_type retain_grad short squeeze
    storage_offset stride swapaxes swapdims t to transpose type type_as unsqueeze view_as_complex view_as_real zero_
    zeros_like _unsafe_view
    """
)

# Pointwise ops that torch builds from others, or whose aten op lacks the tag.
POINTWISE_NAMES = _words(
    """
    abs absolute add addcdiv addcmul and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh bessel_j0 bessel_j1
    bitwise_not celu clamp clamp_max clamp_min clip complex conj conj_physical copy copysign deg2rad digamma divide elu
    entr eq erf erfc erfcx erfinv exp2 expit expm1 fill fix float_power floor_divide floordiv fmax fmin fmod frac frexp
    gammainc gammaincc gammaln gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside
    hypot i0 i0e i1 i1e iadd iand ifloordiv ilshift imag imod imul invert ior ipow irshift isclose isfinite isinf isnan
    isneginf isposinf isreal isub itruediv ixor lcm ldexp le leaky_relu lerp less less_equal log1p log_ndtr log_sigmoid
    logical_and logical_not logical_or logical_xor logit logsigmoid lshift lt masked_fill maximum minimum mish mod mul
    multigammaln multiply mvlgamma nan_to_num ndtr ne neg negative nextafter not_equal or polar polygamma pos positive
    pow psi rad2deg radd rand rdiv real relu relu6 remainder rfloordiv rlshift rmod rmul ror round rpow rrshift rshift
    rsub rtruediv rxor selu sgn sigmoid sign signbit silu sinc softplus softshrink softsign square sub subtract tanh
    tanhshrink threshold true_divide truediv trunc where xlog1py xlogy xor zeta
    """
)
# Not elementwise in every argument, random, or shape-changing although tagged or named alike.
NOT_POINTWISE = _words("bernoulli dropout glu multinomial native_dropout normal prelu rand rrelu")
# Their backward formulas make zeros, or buffers, that know nothing of shards: autograd runs on the local op instead.
LOCAL_GRADIENT = _words("copysign log_sigmoid logsigmoid multigammaln mvlgamma sgn")

# Pointwise functions that may return their argument, or a view of it.
MAY_ALIAS = _words("conj conj_physical imag pos positive real")

# They would hand out the storage of a shard as if it were the global tensor, or change the metadata of one rank.
REFUSED = _words(
    """
    __array__ __dlpack__ _typed_storage apply_ as_strided as_strided_ data_ptr map2_ map_ numpy pin_memory resize_
    resize_as_ set_ share_memory_ sparse_resize_ squeeze_ storage storage_type swap_tensors swapaxes_ swapdims_ t_
    to_mkldnn to_sparse transpose_ unsqueeze_ untyped_storage
    """
)

INPLACE_OPERATORS = _words("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift")

# Functions of which torch returns views; a gathered answer is a copy that must not pass for one.
VIEW_NAMES = _words(
    "diagonal unfold narrow split split_with_sizes chunk tensor_split hsplit vsplit dsplit select unbind"
)
