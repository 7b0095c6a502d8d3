"""Which family an operator belongs to: a table of name patterns, then the kind of its OpInfo.

The table is read from top to bottom and the first pattern that matches the whole name decides.
"""

from __future__ import annotations

import re

FAMILIES: tuple[tuple[str, str], ...] = (
    ("loss", r".*(_loss|cross_entropy|kl_div|nll).*|nn\..*Loss|nn\.functional\.(binary_cross_entropy.*|ctc.*)"),
    ("attention", r".*(attention|Attention|Transformer).*"),
    (
        "random",
        r"(bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|uniform|rand|randint|randn|"
        r"randperm)(_like)?(\..*)?|.*(dropout|Dropout).*|.*(rrelu|RReLU).*|.*(pca|svd)_lowrank",
    ),
    ("fft", r"fft\..*|stft|istft|signal\..*"),
    ("norm", r".*(layer_norm|batch_norm|group_norm|instance_norm|rms_norm|local_response_norm|softmin|softmax).*"),
    ("norm", r".*(LayerNorm|BatchNorm|GroupNorm|InstanceNorm|RMSNorm|LocalResponseNorm|Softmax|Softmin).*"),
    ("norm", r"nn\.functional\.normalize"),
    (
        "window",
        r".*(conv|Conv|pool|Pool|fold|Fold|pad|Pad|interpolate|upsample|Upsample|grid_sample|affine_grid|pixel_|"
        r"Pixel|channel_shuffle|ChannelShuffle).*",
    ),
    ("linalg", r"linalg\.(?!.*norm|vecdot|cross|diagonal|multi_dot|matrix_power|vander).*"),
    (
        "linalg",
        r"cholesky.*|qr|svd|lu.*|geqrf|ormqr|orgqr|pinverse|inverse|logdet|det|slogdet|triangular_solve|"
        r"matrix_exp|lobpcg|linalg\.(vander|matrix_power|multi_dot)",
    ),
    (
        "matmul",
        r"matmul|mm|bmm|addmm.*|addbmm|baddbmm|addmv|addr|mv|dot|vdot|inner|outer|ger|kron|einsum|tensordot|"
        r"sparse\..*|chain_matmul|cdist|__rmatmul__|linalg\.(vecdot|cross)|cross|.*bilinear.*|nn\.functional\.linear|"
        r"nn\.(Linear|Bilinear|LazyLinear|Identity)|_int_mm|.*scaled_mm.*|.*grouped_mm.*",
    ),
    ("recurrent", r"nn\.(RNN|LSTM|GRU).*"),
    (
        "index",
        r"(index|scatter|gather|take|put|masked_s|nonzero|argwhere|where|__getitem__|bucketize|searchsorted|"
        r"histc|histogram|bincount|unique|unravel|_unsafe_masked|embedding|select_scatter|slice_scatter|diagonal_scatter|one_hot|"
        r"isin|tril_indices|triu_indices).*|.*(embedding|Embedding|one_hot).*|masked_select|masked_scatter",
    ),
    ("sort", r"sort|argsort|topk|msort|kthvalue|mode|median|nanmedian|quantile|nanquantile|unique.*"),
    ("scan", r"cum.*|logcumsumexp|diff|cumulative_trapezoid|trapezoid|trapz|gradient|corrcoef|cov"),
    (
        "reduction",
        r"(masked\.)?(sum|mean|var|std|prod|any|all|amax|amin|aminmax|argmax|argmin|max|min|norm|logsumexp|"
        r"count_nonzero|nansum|nanmean|var_mean|std_mean|dist|equal|allclose|trace|hash_tensor)(\..*)?|"
        r"sum_to_size|.*reduc.*|linalg\..*norm|masked\..*|nn\.functional\.(cosine_similarity|pairwise_distance|pdist)|"
        r"nn\.(CosineSimilarity|PairwiseDistance)|is_nonzero|item|segment_reduce|.*segment_reduce.*",
    ),
    (
        "creation",
        r"(arange|linspace|logspace|full|ones|zeros|empty|eye|new_.*|tri|scalar_tensor|complex|polar)"
        r"(_like|_strided|_permuted)?(\..*)?|.*_like",
    ),
    (
        "view",
        r"(view|reshape|flatten|ravel|unflatten|permute|transpose|t|T|H|mT|mH|adjoint|movedim|moveaxis|swap.*|squeeze|"
        r"unsqueeze|expand|chunk|tensor_split|split|hsplit|vsplit|dsplit|unsafe_.*|unbind|select|slice|narrow|stack|"
        r"cat|_chunk_cat|concat|hstack|vstack|dstack|column_stack|row_stack|roll|flip|fliplr|flipud|rot90|repeat|tile|"
        r"as_strided|diag|diagonal|block_diag|atleast|broadcast|unfold|contiguous|meshgrid|cartesian|combinations|"
        r"tril|triu|alias|detach|clone|resize|rearrange|vander|repeat_interleave|linalg\.diagonal).*|nn\.(Un)?[fF]latten",
    ),
)

ORDER = (
    "pointwise",
    "reduction",
    "view",
    "matmul",
    "norm",
    "window",
    "attention",
    "index",
    "sort",
    "scan",
    "loss",
    "random",
    "creation",
    "linalg",
    "fft",
    "recurrent",
    "other",
)
_POINTWISE = re.compile(
    r"(add.*|sub|rsub|mul|div.*|__r\w+__|addcdiv|addcmul|clamp.*|clip|lerp|where|masked_fill|fill|zero_|"
    r"float_power|pow|to|to_.*|type_as|bool|byte|char|double|float|half|int|long|short|bfloat16|c?float|cdouble|"
    r"chalf|isclose|nan_to_num|polygamma.*|mvlgamma.*|bitwise_.*|logical_.*|view_as_.*|real|imag|conj.*|resolve_.*|"
    r"frexp|ldexp|hypot|heaviside|logaddexp.?|jiterator.*|renorm|copysign|nn\.functional\.(\w*elu|\w*sigmoid|\w*swish|\w*tanh|\w*shrink|glu|mish|"
    r"softplus|softsign|silu|relu6?|threshold|feature_scale))|"
    r"nn\.(\w*ELU|\w*Sigmoid|\w*swish|\w*Tanh|\w*tanh|\w*shrink|GLU|Mish|Softplus|Softsign|SiLU|ReLU6?|Threshold|GELU|PReLU|LeakyReLU)"
)


def family_of(name: str, kind: str = "") -> str:
    """The family of the operator called ``name``; ``kind`` is the class name of its OpInfo."""
    if kind in ("UnaryUfuncInfo", "BinaryUfuncInfo"):
        return "pointwise"
    for family, pattern in FAMILIES:
        if re.fullmatch(pattern, name):
            return family
    if _POINTWISE.fullmatch(name) or kind == "ShapeFuncInfo":
        return "view" if kind == "ShapeFuncInfo" else "pointwise"
    return {"ReductionOpInfo": "reduction", "SpectralFuncInfo": "fft"}.get(kind, "other")
