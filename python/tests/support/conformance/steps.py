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
        "F.rms_norm({x} + 3, {last})",
    )  # fmt: skip
    w.add(text.format(x=x, last=shape[-1:], two=shape[-2:]))


def image(w, dims=(4,)):
    """A tensor so far of as many dims, or a new one."""
    try:
        return w.tensor(lambda x: x.dim() in dims and x.numel())
    except Unfit:
        extents = w.pick(1, 2), w.pick(2, 4), w.pick(3, 6, 7), w.pick(2, 4, 5)
        return w.given(extents[: w.pick(*dims)])


def stencil(w):
    """Neighbours along the last dim of (batch, channels, length), or the last two."""
    x = image(w, dims=(3, 4))
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


def ordered(w):
    """Order, counts and sums along a dim; what jumps is of detached numbers."""
    x = w.tensor(lambda x: x.dim())
    text = w.pick(
        "{x}.kthvalue(1, {d})[0]", "{x}.quantile(0.3, {d})", "{x}.cummin({d})[0]",
        "{x}.aminmax(dim={d})[1]", "torch.trapezoid({x}, dim={d})",
        "torch.cumulative_trapezoid({x}, dim={d})", "{x}.nanmean({d})",
        "torch.bucketize({x}, torch.tensor([-1.0, 0.25, 1.0]).double()).double()",
        "{x}.count_nonzero({d}).double()", "({x} > 0.25).any({d}).double()",
        "({x} > -1).all({d}).double()", "{x}.detach().histc(4, -2, 2)",
        "{x}.detach().unique()", "{x}.msort()", "torch.var_mean({x}, {d})[0]",
        "{x}.sort({d}, descending=True)[0]", "torch.gradient({x}, dim={d})[0]",
    )  # fmt: skip
    w.add(text.format(x=x, d=w.dim(x)))


def scattered(w):
    """Rows and elements that are written, added or taken by an index."""
    x = w.tensor(lambda x: x.dim())
    dim = w.dim(x)
    shape = w.values[x].shape
    # Of a tensor without elements PyTorch takes rows that do not exist; we don't.
    extent = shape[dim] if shape.numel() else 0
    chosen = [w.pick(*range(extent)) for _ in range(2)] if extent else []
    rows = f"torch.tensor({chosen}, dtype=torch.int64)"
    text = w.pick(
        "{x}.scatter_add({d}, torch.zeros_like({x}).long(), {x})",
        "{x}.scatter_reduce({d}, torch.zeros_like({x}).long(), {x}, 'mean')",
        "{x}.scatter_reduce({d}, torch.zeros_like({x}).long(), {x}, 'amax')",
        "{x}.index_reduce({d}, {i}, {x}.index_select({d}, {i}), 'mean')",
        "{x}.index_copy({d}, {i}[:1], {x}.index_select({d}, {i}[:1]) * 2)",
        "{x}.take(torch.tensor([0, -1, 0]))", "{x}[{x} > 0.25]",
        "{x}.masked_scatter({x} > 0.5, {x}.flatten() * 2)",
        "torch.index_put({x}, [{i}], {x}[:1] * 2, accumulate=True)",
        "{x}[{i}, {i}]", "{x}[..., {i}]", "{x}[{i}[:, None], ..., {i}]",
        "torch.index_put({x}, [{i}, {i}], {x}.mean(), accumulate=True)",
        "{x}[torch.arange({x}.shape[0]).flip(0)]", "{x}[None, ..., :1]",
        "{x}.put({i}, {x}.flatten()[:2], accumulate=True)",
        "F.embedding({i}, {x})",
    )  # fmt: skip
    w.add(text.format(x=x, d=dim, i=rows))


def transform(w):
    x = w.tensor(lambda x: x.dim())
    text = w.pick(
        "torch.fft.fft({x}, dim={d}).real", "torch.fft.ifft({x}, dim={d}).imag",
        "torch.fft.rfft({x}, dim={d}).real.square()", "torch.fft.fft2({x}).imag",
        "torch.fft.irfft(torch.fft.rfft({x}, dim={d}) * 2, {n}, {d})",
        "torch.view_as_real(torch.fft.fftn({x}))", "torch.fft.fftshift({x}, {d})",
        "torch.fft.fft({x}, 3, {d}, 'ortho').imag", "torch.fft.hfft({x}, dim={d})",
        "torch.view_as_real(torch.complex({x}, {x} + 1))",
    )  # fmt: skip
    dim = w.dim(x)
    w.add(text.format(x=x, d=dim, n=w.values[x].shape[dim]))


def attention(w):
    x = w.tensor(lambda x: x.dim() in (2, 3, 4))
    *batch, length, width = w.values[x].shape
    y = w.given((*batch, w.pick(1, 2, 5), width), plain=w.pick(False, True))
    mask = w.given((length, w.values[y].shape[-2]), plain=w.pick(False, True))
    text = w.pick(
        "{x}, {y}, {y} * 2", "{x}, {x} * 2, {x}", "{x}, {x} + 1, {x}, is_causal=True",
        "{x}, {y}, {y}, {m}", "{x}, {y}, {y}, {m} > -1.5",
    )  # fmt: skip
    w.add(f"F.scaled_dot_product_attention({text.format(x=x, y=y, m=mask)})")


def loss(w):
    x = w.tensor(lambda x: x.dim())
    y = w.given(w.values[x].shape, plain=w.pick(False, True))
    text = w.pick(
        "F.mse_loss({x}, {y}, reduction={r!r})", "F.huber_loss({x}, {y}, {r!r})",
        "F.smooth_l1_loss({x}, {y}, reduction={r!r})",
        "F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), reduction={r!r})",
        "F.kl_div({x}.log_softmax({d}), {y}.softmax({d}), reduction={r!r})",
        "F.cosine_similarity({x} + 2, {y} + 2, dim={d})",
        "F.poisson_nll_loss({x}, {y}, reduction={r!r})",
        "F.cross_entropy({x}, {y}.softmax(1), reduction={r!r})",
        "F.cross_entropy({x}, torch.zeros_like({y}[:, 0]).long(), reduction={r!r})",
        "F.gaussian_nll_loss({x}, {y}, {y}.square() + 1, reduction={r!r})",
        "F.soft_margin_loss({x}, {y}.detach(), reduction={r!r})",
    )  # fmt: skip
    reduction = w.pick("none", "mean", "sum")
    w.add(text.format(x=x, y=y, d=w.dim(x), r=reduction))


def matrices(w):
    x = w.tensor(lambda x: x.dim() > 1)
    text = w.pick(
        "{x} @ {x}.mT", "torch.linalg.solve({x} @ {x}.mT + 3 * torch.eye({n}), {x})",
        "torch.linalg.inv({x} @ {x}.mT + 3 * torch.eye({n}))", "{x}.triu(1)",
        "torch.linalg.cholesky({x} @ {x}.mT + 3 * torch.eye({n}))", "torch.cov({x})",
        "torch.linalg.matrix_norm({x} + 1)", "torch.kron({x}, {x}[:1])", "{x}.trace()",
        "torch.einsum('...ij,...kj->...ik', {x}, {x})", "torch.block_diag({x}, {x})",
        "torch.linalg.det({x} @ {x}.mT + torch.eye({n}))", "{x}.diag_embed()",
        "torch.baddbmm({x}, {x} @ {x}.mT, {x}, alpha=0.5)", "torch.pdist({x} + 1)",
    )  # fmt: skip
    if "pdist" in text and not w.values[x].shape[0]:
        raise Unfit  # PyTorch's gradient of no rows ends the process
    w.add(text.format(x=x, n=f"{w.values[x].shape[-2]}, dtype=torch.float64"))


def windows(w):
    """Of images: what stencil() has not."""
    x = image(w)
    batch, channels = w.values[x].shape[:2]
    kernel, padding = w.pick((1, 2), (2, 2), (3, 2)), w.pick(0, 1)
    size = w.pick((3, 5), (7, 2), (4, 8))
    factors = w.pick((1.1, 2), (2.1, 1.02), (0.6, 1.7))
    grid = w.given((batch, *size, 2), plain=w.pick(False, True))
    weight = w.given((2 * channels, 1, *kernel), plain=True)
    text = w.pick(
        "F.unfold({x}, {k}, padding={p})", "F.pixel_unshuffle({x}, 2)",
        "F.fold(F.unfold({x}, {k}, padding={p}), {x}.shape[2:], {k}, padding={p})",
        "F.pixel_shuffle({x}, 2)", "F.channel_shuffle({x}, 2)",
        "F.interpolate({x}, {s}, mode='bicubic')",
        "F.interpolate({x}, {s}, mode='area')",
        "F.interpolate({x}, {s}, mode='bilinear', align_corners=True)",
        "F.interpolate({x}, {s}, mode='nearest-exact')",
        "F.interpolate({x}, {s}, mode='bilinear', antialias=True)",
        "F.interpolate({x}, scale_factor={f}, mode='nearest')",
        "F.interpolate({x}, scale_factor={f}, mode='bicubic')",
        "F.interpolate({x}, scale_factor={f}, mode='bilinear', antialias=True)",
        "F.grid_sample({x}, {g}.tanh(), align_corners=False)",
        "F.grid_sample({x}, {g}, padding_mode='border', align_corners=True)",
        "F.conv2d({x}, {w}, dilation=2, padding={p}, groups={c})",
        "F.conv2d({x}, {w}, padding='same', groups={c})",
        "F.conv_transpose2d({x}, {w}.transpose(0, 1), stride=2, output_padding=1)",
        "F.avg_pool2d({x}, 3, 2, 1, ceil_mode=True, count_include_pad=False)",
        "F.max_pool2d({x}, 3, 2, 1, ceil_mode=True)", "F.adaptive_max_pool2d({x}, {k})",
        "F.max_pool2d({x}, {k}, 1, dilation=2)", "F.local_response_norm({x}, 3)",
    )  # fmt: skip
    given = {"s": size, "f": factors, "g": grid, "w": weight, "c": channels}
    w.add(text.format(x=x, k=kernel, p=padding, **given))


def transformed(w):
    """Functions of functions: recomputed, differentiated, mapped."""
    x = w.tensor(lambda x: x.dim())
    text = w.pick(
        "checkpoint(lambda t: t.sin() * t.mean(), {x}, use_reentrant=False)",
        "torch.func.jvp(lambda t: t.sin() * t, ({x},), ({x} + 1,))[1]",
        "torch.func.grad(lambda t: (t.sin() * t).sum())({x})",
        "torch.func.vjp(lambda t: t.cumsum({d}), {x})[1]({x})[0]",
        "torch.vmap(lambda t: t.sin() * t.sum(), {d})({x})",
    )  # fmt: skip
    w.add(text.format(x=x, d=w.dim(x)))


STEPS = (
    unary, binary, reduction, whole_reduction, along_dim, moved_dims, reshape, merged,
    slices, indexed, joined, written, product, normed, stencil, drawn, moved, moved,
    ordered, scattered, transform, attention, loss, matrices, windows, transformed,
)  # fmt: skip
