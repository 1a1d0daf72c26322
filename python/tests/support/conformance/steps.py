"""The lines of random programs, a function per family of operators.

Each takes a Writer (programs.py), draws the tensors and arguments of one line and
adds it. Operators that jump where values differ in the last digit (round, floor,
argmax) are left out: one device's own two ways to add would differ there.
"""

import math


class Unfit(Exception):
    """No tensor so far fits the step, or PyTorch refuses it."""


def unary(w):
    x = w.tensor()
    text = w.pick(
        "{}.tanh()", "{}.sin()", "{}.sigmoid()", "{}.relu()", "-{}", "{}.abs()",
        "{}.square()", "({}.square() + 1).rsqrt()", "F.gelu({})", "F.softplus({})",
        "{} * -0.5", "1 - {}", "{}.clamp(-0.5, 0.5)", "{}.clone()", "{}.contiguous()",
        "{}.detach()", "F.leaky_relu({})", "F.silu({})", "torch.zeros_like({})",
    )  # fmt: skip
    w.add(text.format(x))


def binary(w):
    x, y = w.tensor(), w.tensor()
    if w.pick(False, True):
        y = w.given(w.values[x].shape, plain=w.pick(False, True))
    text = w.pick(
        "{x} + {y}", "{x} * {y}", "{x} - {y}", "torch.maximum({x}, {y})",
        "torch.where({x} > {y}, {x}, {y})", "torch.lerp({x}, {y}, 0.25)",
        "{x} / ({y}.square() + 1)", "torch.addcmul({x}, {y}, {y})",
        "torch.hypot({x}, {y} + 1)", "torch.atan2({x}, {y}.square() + 1)",
    )  # fmt: skip
    w.add(text.format(x=x, y=y))


def reduction(w):
    x = w.tensor(lambda x: x.dim())
    how = w.pick("sum", "mean", "amax", "logsumexp", "var", "norm", "nansum", "std")
    if how == "norm":
        return w.add(f"torch.linalg.vector_norm({x}, dim={w.dim(x)})")
    dims = sorted({w.dim(x), w.dim(x)})
    least = 1e-3 if how == "std" else None  # at 0 it has no derivative
    return w.add(f"{x}.{how}({dims}, keepdim={w.pick(False, True)})", least=least)


def whole_reduction(w):
    w.add(w.pick("{}.sum()", "{}.mean()", "{}.prod()", "{}.max()").format(w.tensor()))


# median of elements of their own: PyTorch's misreads an expanded tensor's.
def along_dim(w):
    x = w.tensor(lambda x: x.dim())
    text = w.pick(
        "{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cumsum({d})", "{x}.flip({d})",
        "{x}.roll(1, {d})", "{x}.roll(-2, {d})", "{x}.cumprod({d})", "{x}.sort({d})[0]",
        "{x}.max({d})[0]", "{x}.cummax({d})[0]", "{x}.diff(dim={d})",
        "{x}.logcumsumexp({d})", "F.normalize({x} + 3, dim={d})", "F.glu({x}, {d})",
        "({x} + 0).median({d})[0]", "{x}.topk(1, {d})[0]",
        "torch.renorm({x}, 2, {d}, 1.0)",
    )  # fmt: skip
    w.add(text.format(x=x, d=w.dim(x)))


def moved_dims(w):
    x = w.tensor(lambda x: x.dim())
    a, b = w.dim(x), w.dim(x)
    text = w.pick(
        "{x}.transpose({a}, {b})", "{x}.movedim({a}, {b})", "{x}.unsqueeze({a})",
        "{x}.squeeze({a})", "{x}.squeeze()", "{x}.mT", "{x}.expand(2, *{x}.shape)",
        "{x}.diagonal(dim1={a}, dim2={b})", "{x}.flatten()", "{x}.unbind({a})[-1]",
        "{x}.chunk(2, {a})[0]", "{x}.split(2, {a})[-1]", "{x}.unfold({a}, 2, 1)",
        "{x}.repeat_interleave(2, {a})", "{x}.tril()",
        "torch.rot90({x}, 1, [{a}, {b}])",
    )  # fmt: skip
    w.add(text.format(x=x, a=a, b=b))


def reshape(w):
    x = w.tensor()
    left, sizes = w.values[x].numel(), []
    for _ in range(w.pick(0, 1, 2)):
        divisors = [n for n in range(1, left + 1) if left % n == 0] or [1]
        sizes.append(w.pick(*divisors))
        left //= sizes[-1]
    w.add(f"{x}.reshape({[*sizes, left]})")


def merged(w):
    """Neighbouring dims into one, and back."""
    x = w.tensor(lambda x: x.dim() > 1)
    begin = w.pick(*range(w.values[x].dim() - 1))
    sizes = list(w.values[x].shape[begin : begin + 2])
    if math.prod(sizes) and w.pick(False, True):
        return w.add(
            f"{x}.flatten({begin}, {begin + 1}).sin().unflatten({begin}, {sizes})"
        )
    return w.add(f"{x}.flatten({begin}, {begin + 1})")


def slices(w):
    x = w.tensor(lambda x: x.dim())
    dim = w.dim(x)
    extent = w.values[x].shape[dim]
    begin, end = sorted([w.pick(*range(extent + 1)), w.pick(*range(extent + 1))])
    item = w.pick(f"{begin}:{end}", f"{begin}:{end}:2", f"{-1 - begin}", f"{end}:")
    w.add(f"{x}[{':, ' * dim}{item}]")


def indexed(w):
    x = w.tensor(lambda x: x.dim())
    dim = w.dim(x)
    extent = w.values[x].shape[dim]
    chosen = [w.pick(*range(extent)) for _ in range(w.pick(1, 2, 3))] if extent else []
    index = f"torch.tensor({chosen}, dtype=torch.int64)"
    text = w.pick(
        "{x}.index_select({d}, {i})", "{x}[{c}{i}]",
        "{x}.index_add({d}, {i}, {x}[{c}{i}])",
        "{x}.index_fill({d}, {i}, 2.0)", "{x}.masked_fill({x} > 0.5, 0.0)",
        "{x}.take_along_dim({x}.argsort({d}, stable=True), {d})",
        "{x}.scatter({d}, {x}.detach().argsort({d}, stable=True), 0.5)",
        "{x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))",
    )  # fmt: skip
    w.add(text.format(x=x, d=dim, i=index, c=":, " * dim))


def joined(w):
    x = w.tensor(lambda x: x.dim())
    y = w.tensor(lambda y: y.dim() == w.values[x].dim())
    text = w.pick(
        "torch.cat([{x}, {y}], {d})", "torch.stack([{x}, {y}], {d})",
        "torch.cat([{x}, {x}.detach() * 2], {d})", "{x}.repeat(*{r})",
        "torch.outer({x}.flatten(), {y}.flatten())",
    )  # fmt: skip
    repeats = [w.pick(1, 2) for _ in w.values[x].shape]
    w.add(text.format(x=x, y=y, d=w.dim(x), r=repeats))


def written(w):
    """In place, on a copy and through its views."""
    x = w.tensor(lambda x: x.dim())
    y = f"x{len(w.values)}"
    dim = w.dim(x)
    extent = w.values[x].shape[dim]
    begin, end = sorted([w.pick(*range(extent + 1)), w.pick(*range(extent + 1))])
    part = f"{y}[{':, ' * dim}{begin}:{end}]"
    line = w.pick(
        f"{y}.tanh_()", f"{y}.mul_(2)", f"{y}.add_({x})", f"{part}.mul_(2)",
        f"{part} = 0.5",
        f"{part}.copy_({x}[{':, ' * dim}{begin}:{end}])", f"{part}.zero_()",
        f"{y}.transpose(0, {dim}).sin_()", f"{y}.flatten()[:2].mul_(3)",
        f"{y}.index_fill_({dim}, torch.arange({begin}, {end}), 1.0)",
    )  # fmt: skip
    w.add(f"{x}.clone()", after=[line])


def product(w):
    x = w.tensor(lambda x: x.dim())
    inner = w.values[x].shape[-1]
    y = w.given((inner, w.pick(1, 3, 4)), plain=w.pick(False, True))
    text = w.pick(
        "{x} @ {y}", "F.linear({x}, {y}.t())", "torch.matmul({x}, {y}[:, 0])",
        "torch.einsum('...i,ij->j...', {x}, {y})", "torch.tensordot({x}, {y}, 1)",
        "torch.cdist({x} + 2, {y}.t())",
    )  # fmt: skip
    w.add(text.format(x=x, y=y))


def normed(w):
    x = w.tensor(lambda x: x.dim() > 1)
    shape = list(w.values[x].shape)
    text = w.pick(
        "F.layer_norm({x}, {last})", "F.group_norm({x}, 1)", "F.layer_norm({x}, {two})",
        "F.instance_norm({x})", "F.batch_norm({x}, None, None, training=True)",
        "F.rms_norm({x}, {last})",
    )  # fmt: skip
    w.add(text.format(x=x, last=shape[-1:], two=shape[-2:]))


def stencil(w):
    """Neighbours along the last dim of (batch, channels, length), or the last two."""
    x = w.tensor(lambda x: x.dim() in (3, 4))
    dims = w.values[x].dim() - 2
    kernel, stride, padding = w.pick(1, 2, 3), w.pick(1, 2), w.pick(0, 1)
    channels = w.values[x].shape[1]
    text = w.pick(
        "conv", "conv_transpose", "avg_pool", "max_pool", "adaptive_avg_pool",
        "lp_pool", "interpolate", "linear", "pad",
    )  # fmt: skip
    if text.startswith("conv"):
        pair = (2, channels) if text == "conv" else (channels, 2)
        weight = w.given((*pair, *[kernel] * dims), plain=True)
        w.add(f"F.{text}{dims}d({x}, {weight}, stride={stride}, padding={padding})")
    elif text == "pad":
        mode = w.pick("constant", "reflect", "replicate", "circular")
        w.add(f"F.pad({x}, {[padding, 1] * dims}, mode={mode!r})")
    elif text == "interpolate":
        w.add(f"F.interpolate({x}, scale_factor=2)")
    elif text == "linear":
        mode = {1: "linear", 2: "bilinear"}[dims]
        w.add(f"F.interpolate({x}, scale_factor=2, mode={mode!r})")
    elif text == "lp_pool":
        w.add(f"F.lp_pool{dims}d({x}.abs() + 1, 2, {kernel}, {stride})")
    elif text == "adaptive_avg_pool":
        w.add(f"F.{text}{dims}d({x}, {kernel})")
    else:
        w.add(f"F.{text}{dims}d({x}, {kernel}, {stride}, {padding})")


def drawn(w):
    """Random numbers, alike on one device and on ranks."""
    x = w.tensor()
    text = w.pick(
        "F.dropout({}, 0.4)",
        "torch.rand_like({}) + {}",
        "torch.bernoulli({}.sigmoid())",
    )
    w.add(text.format(x, x), before=["torch.manual_seed(3)"])


def moved(w):
    x = w.tensor()
    w.add(f"redistributed({x}, {w.layout(w.values[x].shape)})")


STEPS = (
    unary, binary, reduction, whole_reduction, along_dim, moved_dims, reshape, merged,
    slices, indexed, joined, written, product, normed, stencil, drawn, moved, moved,
)  # fmt: skip
