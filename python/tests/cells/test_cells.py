"""Meshes of points and cells: one device's numbers, however both are cut."""

import itertools

import pytest
import rig
import torch
from layouts import placements_of, sweep
from ranks import assert_close, check_op, ranks, shard, sharded
from scipy import spatial
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import mesh as cm

KINDS = {"line": 1, "triangle": 2, "quad": 2, "tetra": 3, "hexahedron": 3}


def block(kind, space=None, bend=0.0):
    """The unit square or cube in cells of a kind: points, shaken inside, and cells."""
    dims = KINDS[kind]
    counts = (5,) if dims == 1 else (3, 4) if dims == 2 else (3, 2, 3)
    axes = [torch.linspace(0, 1, n, dtype=torch.float64) for n in counts]
    points = torch.cartesian_prod(*axes).reshape(-1, dims)
    inner = ((points > 0) & (points < 1)).all(dim=1, keepdim=True)
    points = points + bend * inner * torch.randn_like(points)
    rows = torch.arange(len(points)).reshape(counts)
    if kind in ("triangle", "tetra"):
        cells = torch.tensor(spatial.Delaunay(points.cpu()).simplices).long()
        size = points[cells[:, 1:]] - points[cells[:, :1]]
        flipped = size.det() < 0
        cells[flipped] = cells[flipped][:, [1, 0, *range(2, dims + 1)]]
        cells = cells[size.det().abs() > 1e-9]
    elif kind == "line":
        cells = torch.stack([rows[:-1], rows[1:]], 1)
    else:
        first = [(0, 0), (1, 0), (1, 1), (0, 1)]
        corners = first if dims == 2 else [(*c, z) for z in (0, 1) for c in first]
        cells = torch.stack(
            [
                rows[tuple(slice(i, n - 1 + i) for i, n in zip(c, counts, strict=True))]
                for c in corners
            ],
            dim=-1,
        ).reshape(-1, len(corners))
    if space == 3 and dims == 2:
        points = torch.cat([points, points.prod(1, keepdim=True)], 1)
    return points, cells


def linear(points):
    slope = torch.arange(1.0, points.shape[1] + 1, dtype=points.dtype)
    return points @ slope + 2, slope


@pytest.mark.parametrize("kind", KINDS)
def test_linear_functions_are_exact(kind):
    points, cells = block(kind, bend=0.05)
    volumes = cm.cell_measures(points, cells, kind)
    assert (volumes > 0).all()
    torch.testing.assert_close(volumes.sum(), torch.ones(()).double())
    values, slope = linear(points)
    for method in ("green_gauss", "least_squares")[: 1 + (kind != "line")]:
        found = cm.cell_gradients(points, cells, kind, values, method)
        torch.testing.assert_close(found, slope.expand(len(cells), -1))
    ones = torch.ones(len(points), 2, dtype=torch.float64)
    masses = cm.apply_mass(points, cells, kind, ones)
    torch.testing.assert_close(masses.sum(0), ones[0])
    torch.testing.assert_close(
        (values * cm.apply_stiffness(points, cells, kind, values)).sum(),
        slope.square().sum(),
    )
    assert cm.apply_stiffness(points, cells, kind, ones).abs().max() < 1e-12
    half = len(cells[0]) // 2
    turned = cells.roll(half, 1) if kind == "hexahedron" else cells.flip(1)
    inside_out = cells[:, [1, 0, 2, 3]] if kind == "tetra" else turned
    assert (cm.cell_measures(points, inside_out, kind) < 0).all()


@pytest.mark.parametrize("kind", ["triangle", "tetra"])
def test_elements_have_their_known_matrices(kind):
    points, cells = block(kind, bend=0.05)
    corners = len(cells[0])
    mass, stiffness = torch.zeros(2, len(points), len(points), dtype=torch.float64)
    factors = torch.rand(len(cells), dtype=torch.float64)
    for cell, factor in zip(cells, factors, strict=True):
        edges = points[cell[1:]] - points[cell[0]]
        volume = edges.det().abs() / (2 if corners == 3 else 6)
        slopes = torch.linalg.inv(edges)
        slopes = torch.cat([-slopes.sum(1, keepdim=True), slopes], 1)
        at = torch.meshgrid(cell, cell, indexing="ij")
        mass[at] += factor * volume * (1 + torch.eye(corners)) / corners / (corners + 1)
        stiffness[at] += factor * volume * slopes.T @ slopes
    eye = torch.eye(len(points), dtype=torch.float64)
    torch.testing.assert_close(cm.apply_mass(points, cells, kind, eye, factors), mass)
    found = cm.apply_stiffness(points, cells, kind, eye, factors)
    torch.testing.assert_close(found, stiffness)


@pytest.mark.parametrize("kind", ["triangle", "quad"])
def test_surfaces_in_space(kind):
    points, cells = block(kind, 3)
    flat = torch.cat([points[:, :2], 1 + points[:, :1]], 1)  # one plane, tilted
    normal = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64) / 2**0.5
    normals = cm.cell_normals(flat, cells, kind)
    torch.testing.assert_close(normals, normal.expand(len(cells), -1))
    areas = cm.cell_measures(flat, cells, kind)
    torch.testing.assert_close(areas.sum(), torch.tensor(2**0.5).double())
    weighted = cm.cell_normals(flat, cells, kind, weighted=True)
    torch.testing.assert_close(weighted, normals * areas[:, None])
    values, slope = linear(flat)
    along = slope - normal * (slope @ normal)
    for method in ("green_gauss", "least_squares"):
        found = cm.cell_gradients(flat, cells, kind, values, method)
        torch.testing.assert_close(found, along.expand(len(cells), -1))


# ---- in pieces ----------------------------------------------------------------


def everything(kind, space):
    """All functions of floating point, of points and values at once."""

    def call(points, cells, values, coefficients):
        results = [
            cm.cell_measures(points, cells, kind),
            cm.cell_centers(points, cells, kind),
            cm.cell_gradients(points, cells, kind, values),
            cm.cell_gradients(points, cells, kind, values[:, 0], "least_squares"),
            cm.apply_mass(points, cells, kind, values, coefficients),
            cm.apply_stiffness(points, cells, kind, values[:, 0]),
            cm.apply_stiffness(points, cells, kind, values, coefficients),
        ]
        if space > 1 and space == KINDS[kind] + 1:
            results.append(cm.cell_normals(points, cells, kind))
        return results

    return call


@ranks(1, 2, 3, "2x2")
@pytest.mark.parametrize("kind, space", [("triangle", 3), ("quad", 2), ("tetra", 3)])
def test_derivatives_in_pieces(mesh, kind, space):
    points, cells = block(kind, space, bend=0.05)
    points.requires_grad_()
    values = torch.randn(len(points), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(len(cells), dtype=torch.float64)
    rows = placements_of(mesh, 0)
    layouts = list(sweep(mesh, cells.shape, dims=[0]))[::2]
    with shardtensor.fallback_mode("error"):
        for layout in layouts:
            check_op(
                everything(kind, space),
                sharded(points, rows, {0: uneven_rows(len(points), mesh.size())}),
                sharded(cells, *layout),
                sharded(values, rows),
                weights,
                mesh=mesh,
                second_order=layout is layouts[0],
            )


def uneven_rows(count, ranks):
    return [count - ranks + 1] + [1] * (ranks - 1)


@ranks(2, 3, "2x2")
def test_normals_of_lines_in_pieces(mesh):
    points = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    cells = torch.randperm(7).repeat(2)[:8].unfold(0, 2, 1)
    rows = placements_of(mesh, 0)
    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, cells.shape, dims=[0]):
            check_op(
                lambda p, c: cm.cell_normals(p, c, "line"),
                sharded(points, rows),
                sharded(cells, *layout),
                mesh=mesh,
                second_order=True,
            )


@ranks(2, 3, "2x2")
def test_hexahedra_in_pieces(mesh):
    points, cells = block("hexahedron", bend=0.05)
    points.requires_grad_()
    values = torch.randn(len(points), 2, dtype=torch.float64, requires_grad=True)
    rows, size = placements_of(mesh, 0), mesh.size()
    check_op(
        everything("hexahedron", 3),
        sharded(points, rows, {0: uneven_rows(len(points), size)}),
        sharded(cells, rows, {0: [0] * (size - 2) + [1, len(cells) - 1]}),
        sharded(values, rows),
        torch.rand(len(cells), dtype=torch.float64),
        mesh=mesh,
        second_order=True,
    )


# ---- what cells share -----------------------------------------------------------


def all_edges(cells):
    pairs = {
        "triangle": [(0, 1), (1, 2), (2, 0)],
        "quad": [(0, 1), (1, 2), (2, 3), (3, 0)],
        "tetra": list(itertools.combinations(range(4), 2)),
    }
    found = {
        tuple(sorted((int(cell[a]), int(cell[b]))))
        for kind, block in cells.items()
        for cell in block
        for a, b in pairs[kind]
    }
    return torch.tensor(sorted(found)).T


def mixed():
    """Two quads and what is left as triangles."""
    points, quads = block("quad")
    split = torch.cat([quads[2:, [0, 1, 2]], quads[2:, [0, 2, 3]]])
    return {"quad": quads[:2], "triangle": split}, len(points)


def test_edges_and_faces_of_one_device():
    cells, points = mixed()
    edges = all_edges(cells)
    assert torch.equal(cm.cell_edges(cells, points), edges)
    faces, sides = cm.cell_faces(cells, points)
    assert torch.equal(faces.sort(dim=1).values, edges.T)
    assert (sides[:, 1] == -1).sum() == 10  # around the square
    assert (sides[:, 0] < sides[:, 1]).sum() == len(faces) - 10
    two = {"triangle": torch.tensor([[0, 1, 2], [2, 1, 3]])}
    faces, sides = cm.cell_faces(two, 4)
    assert faces.tolist() == [[0, 1], [2, 0], [1, 2], [1, 3], [3, 2]]
    assert sides.tolist() == [[0, -1], [0, -1], [0, 1], [1, -1], [1, -1]]


def test_faces_close_each_cell():
    """Their area vectors, out of the cell, sum to nothing."""
    face_kinds = {2: "line", 3: "triangle", 4: "quad"}
    for kind, corners in (
        ("triangle", 2),
        ("quad", 2),
        ("tetra", 3),
        ("hexahedron", 4),
    ):
        points, cells = block(kind, bend=0.05)
        faces, sides = cm.cell_faces({kind: cells}, len(points))
        assert faces.shape[1] == corners
        areas = cm.cell_normals(points, faces, face_kinds[corners], weighted=True)
        out = cm.cell_centers(points, faces, face_kinds[corners])
        out = out - cm.cell_centers(points, cells, kind)[sides[:, 0]]
        assert ((out * areas).sum(1) > 0).all()
        unit = cm.cell_normals(points, faces, face_kinds[corners])
        lengths = areas.norm(dim=1, keepdim=True)
        torch.testing.assert_close(unit, areas / lengths)
        sums = torch.zeros(len(cells) + 1, KINDS[kind], dtype=torch.float64)
        sums.index_add_(0, sides[:, 0], areas)
        sums.index_add_(0, sides[:, 1] % (len(cells) + 1), -areas)
        assert sums[:-1].abs().max() < 1e-12
        assert areas[sides[:, 1] < 0].sum(0).abs().max() < 1e-12


@ranks(1, 2, 3, "2x2")
def test_edges_and_faces_in_pieces(mesh):
    cells, points = mixed()
    expected = cm.cell_edges(cells, points), *cm.cell_faces(cells, points)
    hexahedra = block("hexahedron")[1]
    sides = cm.cell_faces({"hexahedron": hexahedra}, 18)
    triangles = cells["triangle"]
    with shardtensor.fallback_mode("error"):
        for layout in sweep(mesh, triangles.shape):
            parts = {
                "quad": shard(cells["quad"], mesh, placements_of(mesh, 0)),
                "triangle": shard(triangles, mesh, *layout),
            }
            found = cm.cell_edges(parts, points), *cm.cell_faces(parts, points)
            for actual, wanted in zip(found, expected, strict=True):
                assert_close(actual, wanted)
        for layout in sweep(mesh, hexahedra.shape, dims=[0]):
            parts = {"hexahedron": shard(hexahedra, mesh, *layout)}
            for actual, wanted in zip(cm.cell_faces(parts, 18), sides, strict=True):
                assert_close(actual, wanted)


# ---- values of cells ------------------------------------------------------------


def centered_case(kind, bend=0.0):
    """A mesh of a kind or of two, its faces, centers, volumes, and linear values at
    centers and faces with their slope."""
    points, cells = block(kind if kind != "mixed" else "quad", bend=bend)
    parts = {kind: cells} if kind != "mixed" else mixed()[0]
    faces = cm.cell_faces(parts, len(points))
    centers = torch.cat([cm.cell_centers(points, c, k) for k, c in parts.items()])
    return points, parts, faces, linear(centers), linear(points)[0][faces[0]].mean(1)


def is_inside(faces, cells):
    """Cells without a face of the boundary."""
    inside = torch.ones(cells, dtype=torch.bool)
    inside[faces[1][faces[1][:, 1] < 0, 0]] = False
    return inside


@pytest.mark.parametrize("kind", ["triangle", "quad", "tetra", "hexahedron", "mixed"])
def test_least_squares_of_linear_values_of_cells(kind):
    """Exact with the boundary's values, and without where neighbours span space."""
    points, parts, faces, (values, slope), around = centered_case(kind, 0.05)
    call = cm.cell_centered_gradients
    found = call(points, parts, faces, values, boundary_values=around)
    torch.testing.assert_close(found, slope.expand(len(values), -1))
    found = call(points, parts, faces, values)
    inside = is_inside(faces, len(values))
    torch.testing.assert_close(found[inside], slope.expand(len(values), -1)[inside])
    for cell, gradient in enumerate(found):  # the part that neighbours tell of
        pairs = faces[1][(faces[1] == cell).any(1) & (faces[1][:, 1] >= 0)]
        others = pairs.sum(1) - cell
        centers = torch.cat([cm.cell_centers(points, c, k) for k, c in parts.items()])
        ways = centers[others] - centers[cell]
        told = torch.linalg.pinv(ways, rtol=1e-9) @ (ways @ slope)
        torch.testing.assert_close(gradient, told)


@pytest.mark.parametrize("kind", ["quad", "hexahedron"])
def test_green_gauss_of_linear_values_of_cells(kind):
    points, parts, faces, (values, slope), around = centered_case(kind)
    call = cm.cell_centered_gradients
    found = call(points, parts, faces, values, "green_gauss", around)
    torch.testing.assert_close(found, slope.expand(len(values), -1))
    row = {"quad": torch.tensor([[i, i + 1, i + 5, i + 4] for i in range(3)])}
    points = torch.cartesian_prod(torch.arange(2.0), torch.arange(4.0)).flip(1)
    faces = cm.cell_faces(row, 8)
    for method, slopes in (("green_gauss", [1, 2, 1]), ("least_squares", [2, 2, 2])):
        found = call(points, row, faces, torch.tensor([1.0, 3, 5]), method)
        expected = torch.tensor([[slope, 0.0] for slope in slopes])
        torch.testing.assert_close(found, expected)


def test_faces_with_fewer_corners_than_others():
    """As beside hexahedra: -1 stands for no corner."""
    points, cells = block("tetra", bend=0.05)
    faces, sides = cm.cell_faces({"tetra": cells}, len(points))
    values = linear(cm.cell_centers(points, cells, "tetra"))[0]
    around = linear(points)[0][faces].mean(1)
    call = cm.cell_centered_gradients
    padded = torch.nn.functional.pad(faces, (0, 1), value=-1)
    for method in ("green_gauss", "least_squares"):
        torch.testing.assert_close(
            call(points, {"tetra": cells}, (padded, sides), values, method, around),
            call(points, {"tetra": cells}, (faces, sides), values, method, around),
        )


def test_a_nan_reaches_its_neighbours_alone():
    points, parts, faces, (values, _), _ = centered_case("quad")
    values[0] = float("nan")
    touched = faces[1][(faces[1] == 0).any(1)].unique()
    touched = touched[touched >= 0]
    for method in ("green_gauss", "least_squares"):
        found = cm.cell_centered_gradients(points, parts, faces, values, method)
        assert found.isnan().any(1).nonzero()[:, 0].tolist() == touched.tolist()
    cells = parts["quad"]
    of_point = (cells == 7).any(1)
    points[7, 0] = float("nan")
    for call in (cm.cell_measures, cm.cell_centers):
        found = call(points, cells, "quad")
        assert torch.equal(found.reshape(len(cells), -1).isnan().any(1), of_point)
    merged, rows = cm.merge_corners(points[cells])
    assert merged.isnan().any(1).sum() == 1 and len(merged) == len(points)
    torch.testing.assert_close(merged[rows], points[cells], equal_nan=True)


def centered(kinds, points, faces, sides, values, around, *cells):
    """Both methods, with the boundary's values and without."""
    parts = dict(zip(kinds, cells, strict=True))
    return [
        cm.cell_centered_gradients(points, parts, (faces, sides), *rest)
        for rest in (
            (values,),
            (values[:, 0], "least_squares", around[:, 0]),
            (values[:, 0], "green_gauss"),
            (values, "green_gauss", around),
        )
    ]


@ranks(1, 2, 3, 4, "2x2")
@pytest.mark.parametrize("kind", ["triangle", "mixed", "hexahedron"])
def test_values_of_cells_in_pieces(mesh, kind):
    points, parts, faces, (values, _), _ = centered_case(kind, 0.05)
    points.requires_grad_()
    values = torch.randn(len(values), 2, dtype=torch.float64, requires_grad=True)
    around = torch.randn(len(faces[0]), 2, dtype=torch.float64, requires_grad=True)
    rows = placements_of(mesh, 0)
    layouts = list(sweep(mesh, values.shape, dims=[0]))[::3]
    with shardtensor.fallback_mode("error"):
        for layout in layouts:
            check_op(
                lambda *arguments: centered(list(parts), *arguments),
                sharded(points, rows, {0: uneven_rows(len(points), mesh.size())}),
                *(sharded(x, rows) for x in faces),
                sharded(values, *layout),
                sharded(around, rows),
                *(sharded(x, rows) for x in parts.values()),
                mesh=mesh,
                second_order=layout is layouts[0],
            )


@ranks(3)
def test_neighbours_of_cells_are_planned_once(mesh):
    points, parts, faces, (values, _), _ = centered_case("triangle")
    rows = placements_of(mesh, 0)
    points, *faces, values = (shard(x, mesh, rows) for x in (points, *faces, values))
    parts = {kind: shard(x, mesh, rows) for kind, x in parts.items()}

    def plans():
        shardtensor.reset_comm_stats()
        cm.cell_centered_gradients(points, parts, faces, values, "green_gauss")
        return shardtensor.comm_stats().plans

    assert plans() > 0
    assert plans() == 0


@ranks(2)
def test_errors_of_values_of_cells(mesh):
    points, parts, faces, (values, _), around = centered_case("quad")
    faces = tuple(shard(x, mesh, placements_of(mesh, 0)) for x in faces)

    def call(points=points, parts=parts, faces=faces, values=values, **rest):
        return cm.cell_centered_gradients(points, parts, faces, values, **rest)

    with pytest.raises(ValueError, match="got 0 blocks and 0 kinds"):
        call(parts={})
    with pytest.raises(ValueError, match="that fill their space, .* got 'quad'"):
        call(points=block("quad", 3)[0])
    with pytest.raises(ValueError, match="that fill their space, .* got 'line'"):
        call(points=points[:, :1], parts={"line": parts["quad"][:, :2]})
    with pytest.raises(ValueError, match=r"expected faces \(F, corners\) and sides"):
        call(faces=(faces[0], faces[1][:, :1]))
    with pytest.raises(ValueError, match=r"values \(C\) or \(C, channels\) of 6 cells"):
        call(values=values[:3])
    with pytest.raises(TypeError, match="values of the points' dtype"):
        call(values=values.float())
    with pytest.raises(TypeError, match="points of float32 or float64, got BFloat16"):
        call(points=points.bfloat16(), values=values.bfloat16())
    with pytest.raises(ValueError, match=r"expected boundary_values \[17\]"):
        call(boundary_values=around[:3])
    with pytest.raises(TypeError, match="boundary_values of the values' dtype"):
        call(boundary_values=around.float())
    with pytest.raises(ValueError, match="got 'spline'"):
        call(method="spline")


@ranks(2)
def test_faces_of_no_points_and_of_no_cells(mesh):
    points, parts, faces, (values, _), _ = centered_case("quad")
    faces = tuple(shard(x, mesh, placements_of(mesh, 0)) for x in faces)
    with pytest.raises(IndexError):
        cm.cell_centered_gradients(
            points, parts, (faces[0] + 20, faces[1]), values, method="green_gauss"
        )
    with pytest.raises(IndexError):
        cm.cell_centered_gradients(points, parts, (faces[0], faces[1] + 20), values)


@ranks(2)
def test_errors_are_the_same_on_all_ranks(mesh):
    points, cells = block("triangle")
    cut = shard(cells, mesh, placements_of(mesh, 0))
    with pytest.raises(ValueError, match="got 'prism'"):
        cm.cell_measures(points, cut, "prism")
    with pytest.raises(ValueError, match=r"expected cells \(C, 4\) of kind 'quad'"):
        cm.cell_measures(points, cut, "quad")
    with pytest.raises(ValueError, match="2 <= D <= 3"):
        cm.cell_measures(points[:, :1], cut, "triangle")
    with pytest.raises(TypeError, match="cells of int64"):
        cm.cell_measures(points, cut.int(), "triangle")
    told = "expected points of float32 or float64 .* got Half and Long"
    with pytest.raises(TypeError, match=told):
        cm.cell_measures(points.half(), cut, "triangle")
    with pytest.raises(ValueError, match=r"or 'line' of points \(N, 2\), got 't"):
        cm.cell_normals(points, cut, "triangle")
    with pytest.raises(ValueError, match=r"values \(N\) or \(N, channels\)"):
        cm.apply_mass(points, cut, "triangle", points[:3])
    with pytest.raises(TypeError, match="values of the points' dtype"):
        cm.apply_mass(points, cut, "triangle", points.float())
    with pytest.raises(ValueError, match="got 'spline'"):
        cm.cell_gradients(points, cut, "triangle", points, "spline")
    with pytest.raises(ValueError, match=r"coefficients \(C\)"):
        cm.apply_mass(points, cut, "triangle", points, points[:2, 0])
    count = len(points)
    for bad in (count, -1):
        cells[-1, 0] = bad
        told = (
            rf"{len(cells) - 1} of the points \[{bad}, .* names none of {count} points"
        )
        for given in (shard(cells, mesh, placements_of(mesh, 0)), cells):
            with pytest.raises(IndexError, match=rf"check_cells: triangle {told}"):
                cm.check_cells(points, given, "triangle")
            if given is cells and rig.DEVICE != "cpu":
                continue  # a device's own numbers are looked at only to be checked
            with pytest.raises(IndexError, match=rf"cell_measures: triangle {told}"):
                cm.cell_measures(points, given, "triangle")
    with pytest.raises(IndexError):
        cm.cell_edges({"triangle": cut + 3}, len(points))
    fan = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
    fan = shard(fan, mesh, placements_of(mesh, 0))
    with pytest.raises(ValueError, match="a face has 3 cells"):
        cm.cell_faces({"triangle": fan}, 5)
    with pytest.raises(ValueError, match="one number of dims"):
        cm.cell_faces({"triangle": fan, "line": fan[:, :2]}, 5)


WRONG_ORDERS = {
    "line": [1, 0],
    "triangle": [0, 2, 1],
    "quad": [0, 1, 3, 2],
    "tetra": [1, 0, 2, 3],
    "hexahedron": [0, 1, 3, 2, 4, 5, 6, 7],
}


@ranks(1, 2, 3, "2x2")
def test_cells_of_wrong_order(mesh):
    """The third cell is wrong; a triangle in space has no wrong order."""
    first = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    for kind, space in [(kind, None) for kind in KINDS] + [("quad", 3)]:
        points, cells = block(kind, space)
        wrong, double, broken = cells.clone(), cells.clone(), points.clone()
        wrong[2] = cells[2, WRONG_ORDERS[kind]]
        double[2, 0] = cells[2, 1]
        broken[cells[2, 0]] = float("nan")
        named = ", ".join(map(str, wrong[2].tolist()))
        for cut in (lambda x: shard(x, mesh, first), lambda x: x):
            cm.check_cells(cut(points), cut(cells), kind)
            cm.check_cells(cut(points), cut(cells[:0]), kind)
            for bad_points, bad_cells, text in (
                (points, double, f"{kind} 2 of .* names a point twice"),
                (
                    points,
                    wrong,
                    rf"{kind} 2 of the points \[{named}\] is .* inside out",
                ),
                (broken, cells, f"{kind} .* is flat or turned inside out"),
            ):
                with pytest.raises(ValueError, match=text):
                    cm.check_cells(cut(bad_points), cut(bad_cells), kind)


@ranks(1, 3, "2x2")
@pytest.mark.parametrize("kind", ["triangle", "quad", "tetra"])
@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e5, 1e9])
def test_gradients_do_not_depend_on_the_unit(mesh, kind, size):
    for space in {KINDS[kind], 3}:
        points, cells = block(kind, space, bend=0.05)
        expected = cm.cell_gradients(points, cells, kind, points[:, 0], "least_squares")
        small = (points * size).float()
        for given in (small, shard(small, mesh, placements_of(mesh, 0))):
            found = cm.cell_gradients(given, cells, kind, given[:, 0], "least_squares")
            assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


@ranks(1, 3, "2x2")
def test_autocast_leaves_geometry_alone(mesh):
    points, cells = block("triangle", bend=0.05)
    points = points.float().requires_grad_()
    values = linear(points.detach())[0]
    functions = {
        "measures": lambda p: cm.cell_measures(p, cells, "triangle"),
        "gradients": lambda p: cm.cell_gradients(p, cells, "triangle", values),
        "fitted": lambda p: cm.cell_gradients(
            p, cells, "triangle", values, "least_squares"
        ),
        "mass": lambda p: cm.apply_mass(p, cells, "triangle", values),
        "stiffness": lambda p: cm.apply_stiffness(p, cells, "triangle", values),
    }
    for function in functions.values():
        expected = function(points)
        (slope,) = torch.autograd.grad(expected.square().sum(), points)
        for given in (points, shard(points, mesh, placements_of(mesh, 0))):
            with torch.autocast(mesh.device_type, torch.bfloat16):
                found = function(given)
            assert_close(found, expected)
            assert_close(torch.autograd.grad(found.square().sum(), given)[0], slope)
