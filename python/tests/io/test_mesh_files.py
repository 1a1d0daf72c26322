"""Meshes by piece: the values of meshio, of the file each rank its share of bytes."""

import os
import sys

import mesh_files
import meshio
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mesh_files import BY_PIECE, WHOLE, bytes_of
from ranks import assert_close, partitions, ranks
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.io.sources import mesh as mesh_format

PRELOAD = ("shardtensor.io", "mesh_files")


def variables(path):
    return mesh_format._variables(meshio.read(path))


def written(name, tmp_path, rows=9, mesh=None):
    """A file that all ranks see."""
    ending, write = {**BY_PIECE, **WHOLE, **STL}[name]
    path = tmp_path / f"a.{ending}"
    if not dist.is_initialized() or dist.get_rank() == 0:
        make = mesh_files.triangles if ending == "stl" else mesh_files.surface
        write(mesh or make(rows), path)
    if dist.is_initialized():
        dist.barrier()
    return path


STL = {
    "stl": mesh_files._by_meshio("stl", binary=True),
    "stl, text": mesh_files._by_meshio("stl", binary=False),
}
LINES = ("obj", "stl, text")


def is_read_whole(monkeypatch):
    def whole(path):
        raise AssertionError(f"{path} is read as a whole")

    monkeypatch.setattr(mesh_format, "_read", whole)


# ---- one rank ---------------------------------------------------------------


@pytest.mark.parametrize("name", BY_PIECE)
def test_every_variable_has_meshios_values(name, tmp_path, monkeypatch):
    path = written(name, tmp_path)
    expected = {
        key: values for key, values in variables(path).items() if values.dtype != "O"
    }
    assert {"points", "cells/triangle", "cells/quad"} <= set(expected)
    is_read_whole(monkeypatch)
    for variable, values in expected.items():
        array = shardtensor.io.open(path, variable)
        assert tuple(array.shape) == values.shape, variable
        rows = len(values)
        for index in (..., slice(1, rows - 1), slice(2, rows, 3), slice(3, 3), -1):
            wanted = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
            assert torch.equal(array[index], wanted[index]), (variable, index)
    with pytest.raises(ValueError, match="no such variable; the file has points, "):
        len(shardtensor.io.open(path, "cells/line"))


@pytest.mark.parametrize("name", STL)
def test_facets_are_read_by_piece_points_are_not(name, tmp_path):
    path = written(name, tmp_path)
    mesh = meshio.read(path)
    corners = shardtensor.io.open(path, "corners")
    facets = mesh.points[mesh.cells[0].data]
    assert torch.equal(corners[...], torch.from_numpy(facets))
    assert torch.equal(corners[5:9, 1], torch.from_numpy(facets[5:9, 1]))
    normals = shardtensor.io.open(path, "cell_data/facet_normals/triangle")
    sides = facets[:, 1:] - facets[:, :1]
    expected = np.cross(sides[:, 0], sides[:, 1])
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    torch.testing.assert_close(
        normals[2:7].double(), torch.from_numpy(expected[2:7]).double(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    points = shardtensor.io.open(path, "points")
    assert torch.equal(points[...], torch.from_numpy(mesh.points))


def test_facets_may_be_written_in_capitals(tmp_path):
    path = written("stl, text", tmp_path)
    normals = "cell_data/facet_normals/triangle"
    wanted = {
        name: shardtensor.io.open(path, name)[...] for name in ("corners", normals)
    }
    path.write_text("\ufeff" + path.read_text().upper(), "utf-8")
    for name, values in wanted.items():
        assert len(values) > 0
        assert torch.equal(shardtensor.io.open(path, name)[...], values)


def test_a_surface_is_empty_only_where_no_text_tells_of_facets(tmp_path):
    path = written("stl, text", tmp_path)
    text = path.read_text()
    in_one_line = " ".join(text.split())
    path.write_text("solid vertex facet\n\nendsolid vertex\n")
    assert len(shardtensor.io.open(path, "corners")) == 0
    for bad, told in (
        (in_one_line, "each vertex on a line of its own, got 192 on 0 lines"),
        (in_one_line + "\n" + text, "got 384 on 192 lines"),
        ("solid\nfaces\nendsolid\n", "1 line tells of something else"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=told):
            len(shardtensor.io.open(path, "corners"))


def test_wedges_have_meshios_order(tmp_path, monkeypatch):
    points = np.random.default_rng(0).random((7, 3))
    wedges = [("wedge", np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]))]
    for name in ("vtu, raw", "vtk 5.1", "vtk 4.2"):
        path = written(name, tmp_path, mesh=meshio.Mesh(points, wedges))
        expected = variables(path)["cells/wedge"]
        assert expected.tolist() == wedges[0][1].tolist()
        found = shardtensor.io.open(path, "cells/wedge")[...]
        assert torch.equal(found, torch.tensor(expected.astype(np.int64)))


def test_words_in_vtks_fields_are_left_out(tmp_path, monkeypatch):
    path = written("vtk 5.1", tmp_path)
    head, rest = path.read_bytes().split(b"UNSTRUCTURED_GRID\n", 1)
    expected = variables(path)["points"]
    long = b"x" * 100
    words = bytes([0xC0 | 5]) + b"hello" + bytes([0x80, len(long)]) + long
    field = b"FIELD FieldData 1\nnote 1 2 string\n" + words + b"\n"
    path.write_bytes(head + b"UNSTRUCTURED_GRID\n" + field + rest)
    is_read_whole(monkeypatch)
    found = shardtensor.io.open(path, "points")[...]
    assert torch.equal(found, torch.from_numpy(expected))


def test_what_vtk_says_of_arrays_is_left_out(tmp_path, monkeypatch):
    """As ParaView writes it, behind the array that it is about."""
    about = b"METADATA\nINFORMATION 1\nNAME L2_NORM_RANGE LOCATION vtkDataArray\n"
    about += b"DATA 2 0 9 \n\n"
    parts = [b"# vtk DataFile Version 4.2\n\nBINARY\nDATASET UNSTRUCTURED_GRID\n"]
    for head, count, dtype in (
        ("POINTS 3 double", 9, ">f8"),
        ("CELLS 1 4", 4, ">i4"),
        ("CELL_TYPES 1", 1, ">i4"),
        ("POINT_DATA 3\nFIELD FieldData 2\na 1 3 double", 3, ">f8"),
        ("b 2 3 int", 6, ">i4"),
        ("CELL_DATA 1\nFIELD FieldData 1\nc 1 1 int", 1, ">i4"),
    ):
        numbers = np.array([3, 0, 1, 2] if "CELLS" in head else np.arange(count) + 5)
        told = b"" if "CELL" in head else about
        parts.append(
            f"{head}\n".encode() + numbers.astype(dtype).tobytes() + b"\n" + told
        )
    path = tmp_path / "a.vtk"
    path.write_bytes(b"".join(parts))
    expected = variables(path)
    is_read_whole(monkeypatch)
    for name in ("points", "point_data/a", "point_data/b", "cell_data/c/triangle"):
        found = shardtensor.io.open(path, name)[...].numpy()
        np.testing.assert_array_equal(found, expected[name])


def test_a_compressor_that_is_not_there(tmp_path, monkeypatch):
    path = written("vtu, raw, zlib", tmp_path)
    text = path.read_bytes()
    monkeypatch.setitem(sys.modules, "lz4", None)
    path.write_bytes(text.replace(b"vtkZLibData", b"vtkLZ4Data"))
    with pytest.raises(ImportError, match="vtkLZ4DataCompressor needs lz4: pip"):
        len(shardtensor.io.open(path, "points"))
    path.write_bytes(text.replace(b"vtkZLibData", b"vtkAnyData"))
    with pytest.raises(ValueError, match="unknown compressor 'vtkAnyDataCompressor'"):
        len(shardtensor.io.open(path, "points"))


def test_what_lines_say_that_differ_is_meshios(tmp_path):
    path = tmp_path / "a.obj"
    path.write_text("v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 0 2 0\nf 1 2 3 4 5\nf 1 2 3")
    polygons = shardtensor.io.open(path, "cells/polygon")
    assert polygons[...].tolist() == [[0, 1, 2, 3, 4]]
    triangles = shardtensor.io.open(path, "cells/triangle")
    assert triangles[...].tolist() == [[0, 1, 2]]


def test_corners_that_count_from_the_last_point(tmp_path, monkeypatch):
    """Relative ones name the points before their line."""
    from shardtensor.io.sources import lines

    monkeypatch.setattr(lines, "BLOCK", 30)
    path = tmp_path / "a.obj"
    first = "v 0 0 0\nv 1 0 0\nv 1 1 0\nf -3 -2 -1\nf 1 -2/-1 3/1/1\n"
    last = "v 0 1 0\nf -4 -1 -2 # four\nf -1 -2 -3 -4\n"
    path.write_text(first + last)
    found = shardtensor.io.open(path, "cells/triangle")
    assert found[...].tolist() == [[0, 1, 2], [0, 1, 2], [0, 3, 2]]
    assert found[2:].tolist() == [[0, 3, 2]]
    assert shardtensor.io.open(path, "cells/quad")[...].tolist() == [[3, 2, 1, 0]]


TOLD = {"99999999999999999999": "beyond int64|expected numbers"}


@pytest.mark.parametrize("corner", ["0", "5", "-4", "-1000", "99999999999999999999"])
@pytest.mark.parametrize("other", ["", "f 1 2 3 4 1\n"])
def test_corners_that_are_no_point(corner, other, tmp_path):
    path = tmp_path / "a.obj"
    points = "v 0 0 0\nv 1 0 0\nv 1 1 0\n"
    path.write_text(f"{points}f 1 2 3\nf 1 {corner} 2\nv 0 0 1\nf 1 2 4\n{other}")
    found = shardtensor.io.open(path, "cells/triangle")
    with pytest.raises(
        (TypeError, ValueError), match=TOLD.get(corner, f"corner is {corner},")
    ):
        found[...]


# ---- several ranks ----------------------------------------------------------


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", [*BY_PIECE, *WHOLE, *STL])
def test_every_rank_gets_its_rows(mesh, name, tmp_path):
    path = written(name, tmp_path)
    expected = variables(path)
    for variable in (
        "points",
        "cells/triangle",
        "point_data/heat",
        "cell_data/number/quad",
    ):
        if variable not in expected:
            continue
        values = expected[variable]
        values = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        array = shardtensor.io.open(path, variable)
        for sizes in partitions(len(values), mesh.size(), repeated=False):
            x = array.read(..., mesh, [Shard(0)], sizes={0: sizes})
            assert_close(x, values)
        x, ghosts = array.read(slice(2, 12), mesh, [Shard(0)], halo=1)
        assert_close(x, values[2:12])
        torch.testing.assert_close(ghosts, shardtensor.halo_exchange(x, 1))


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", STL)
def test_facets_become_meshios_mesh(mesh, name, tmp_path):
    path = written(name, tmp_path)
    expected = variables(path)
    corners = shardtensor.io.open(path, "corners").read(..., mesh, [Shard(0)])
    points, cells = shardtensor.mesh.merge_corners(corners)
    assert_close(points, torch.from_numpy(expected["points"]))
    assert_close(cells, torch.from_numpy(expected["cells/triangle"]))


@ranks(3)
def test_files_of_a_mesh_follow_each_other(mesh, tmp_path):
    paths = []
    for index, rows in enumerate((4, 7)):
        folder = tmp_path / str(index)
        folder.mkdir(exist_ok=True)
        paths.append(written("obj", folder, rows))
    values = np.concatenate([variables(path)["points"] for path in paths])
    array = shardtensor.io.open(paths, "points", mesh=mesh)
    assert array.shape == values.shape
    assert_close(array.read(..., mesh, [Shard(0)]), torch.from_numpy(values))


# ---- bytes ------------------------------------------------------------------


LARGE = 181  # rows of points: 32761 points, 64800 cells in three blocks


def stored_bytes(path, variable):
    """Of a variable in a file that is not compressed or text."""
    return variables(path)[variable].nbytes


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["vtu, raw", "vtu, base64", "vtu, inline", "vtk 5.1"])
def test_a_rank_reads_its_share_of_the_bytes(mesh, name, tmp_path):
    path = written(name, tmp_path, LARGE)
    shardtensor.io.open(path, "points").read(..., mesh, [Shard(0)])
    few = 40_000  # tags and what stands around them
    types = 4 if name.startswith("vtk") else 1  # bytes for a cell's kind
    cells = (LARGE - 1) ** 2
    in_base64 = 4 / 3 if "raw" not in name and "vtu" in name else 1
    for variable, beside in (("points", 0), ("point_data/heat", 0),
                             ("cells/triangle", types * cells)):  # fmt: skip
        whole = stored_bytes(path, variable)
        if variable == "cells/triangle":  # from the first to the last of a rank
            whole += stored_bytes(path, "cells/quad")
        array = shardtensor.io.open(path, variable)
        read, _ = bytes_of(lambda a=array: a.read(..., mesh, [Shard(0)]))
        share = in_base64 * (whole / mesh.size() + beside)
        if variable != "cells/triangle":
            assert 0.99 * share <= read <= 1.01 * share + few, (variable, read, share)
        assert read <= 1.01 * in_base64 * (whole + beside) + few
    total = os.path.getsize(path)
    assert total > 20 * few


@ranks(1, 2, 4)
def test_only_the_blocks_of_a_rank_are_decompressed(mesh, tmp_path, monkeypatch):
    path = written("vtu, raw, zlib", tmp_path, LARGE)
    from shardtensor.io.sources import stored_bytes as storage

    blocks = []
    kept = storage.Compressed._decoded

    def noted(self, stored, first, index):
        blocks.append(index)
        return kept(self, stored, first, index)

    monkeypatch.setattr(storage.Compressed, "_decoded", noted)
    array = shardtensor.io.open(path, "points")
    read, x = bytes_of(lambda: array.read(..., mesh, [Shard(0)]))
    all_blocks = -(-x.numel() * 8 // mesh_files.BLOCK)
    assert len(blocks) <= all_blocks / mesh.size() + 2
    assert read < os.path.getsize(path)
    everyones = [None] * mesh.size()
    dist.all_gather_object(everyones, sorted(blocks))
    assert set().union(*everyones) == set(range(all_blocks))


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["obj", "stl", "stl, text"])
def test_a_rank_counts_and_reads_its_share_of_lines(mesh, name, tmp_path, monkeypatch):
    """Lines are counted once, by all ranks together, then a rank reads the blocks that
    hold its rows; facets of binary files are found without counting."""
    from shardtensor.io.sources import lines

    monkeypatch.setattr(lines, "BLOCK", 10_000)
    path = written(name, tmp_path, LARGE)
    size, few = os.path.getsize(path), 60_000
    variable = "points" if name == "obj" else "corners"
    array = shardtensor.io.open(path, variable)
    opened, _ = bytes_of(lambda: array._agree_to_open(mesh))
    counted = 0 if name == "stl" else size / mesh.size()
    assert 0.99 * counted <= opened <= 1.04 * counted + few, (opened, counted)
    read, x = bytes_of(lambda: array.read(..., mesh, [Shard(0)]))
    assert read <= size / mesh.size() + few, (read, size)
    again, _ = bytes_of(lambda: array.read(..., mesh, [Shard(0)]))
    assert again <= read + few  # nothing is counted again
    assert x.shape[0] in (LARGE**2, 2 * (LARGE - 1) ** 2, (LARGE - 1) ** 2)


@ranks(2)
def test_one_rank_alone_reads_what_is_not_read_by_piece(mesh, tmp_path):
    path = written("vtu, text", tmp_path, LARGE)
    expected = torch.from_numpy(variables(path)["points"])
    dist.barrier()
    array = shardtensor.io.open(path, "points")
    read, x = bytes_of(lambda: array.read(..., mesh, [Shard(0)]))
    assert_close(x, expected)
    size = os.path.getsize(path)
    assert read > size if dist.get_rank() == 0 else read < size / 20


def polydata(path):
    """A pyramid of a quad and three triangles, a line and a vertex, as text; the
    order of their data is VTK's: vertices, lines, polygons."""
    points = "0 0 0  1 0 0  1 1 0  0 1 0  .5 .5 1"
    lines = [
        "# vtk DataFile Version 3.0", "a pyramid", "ASCII", "DATASET POLYDATA",
        "POINTS 5 double", points, "VERTICES 1 2", "1 4", "LINES 1 3", "2 0 4",
        "POLYGONS 4 17", "3 0 1 4", "4 0 1 2 3", "3 1 2 4", "3 2 3 4",
        "CELL_DATA 6", "SCALARS number double", "LOOKUP_TABLE default", "0 1 2 3 4 5",
        "POINT_DATA 5", "SCALARS heat double", "LOOKUP_TABLE default", "5 6 7 8 9",
    ]  # fmt: skip
    if path.suffix == ".vtp":
        lines = [
            '<VTKFile type="PolyData" version="0.1"><PolyData>',
            '<Piece NumberOfPoints="5" NumberOfVerts="1" NumberOfLines="1" '
            'NumberOfStrips="0" NumberOfPolys="4">',
            f"<Points>{array('Points', points, 3)}</Points>",
            f"<PointData>{array('heat', '5 6 7 8 9')}</PointData>",
            f"<CellData>{array('number', '0 1 2 3 4 5')}</CellData>",
            f"<Verts>{cells('4', '1')}</Verts><Lines>{cells('0 4', '2')}</Lines>",
            f"<Polys>{cells('0 1 4 0 1 2 3 1 2 4 2 3 4', '3 7 10 13')}</Polys>",
            "</Piece></PolyData></VTKFile>",
        ]
    path.write_text("\n".join(lines))


def array(name, text, width=1, kind="Float64"):
    told = f'type="{kind}" Name="{name}" NumberOfComponents="{width}" format="ascii"'
    return f"<DataArray {told}>{text}</DataArray>"


def cells(corners, offsets):
    connectivity = array("connectivity", corners, kind="Int64")
    return connectivity + array("offsets", offsets, kind="Int64")


POLYDATA = {
    "points": [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0.5, 0.5, 1]],
    "cells/vertex": [[4]],
    "cells/line": [[0, 4]],
    "cells/triangle": [[0, 1, 4], [1, 2, 4], [2, 3, 4]],
    "cells/quad": [[0, 1, 2, 3]],
    "point_data/heat": [5, 6, 7, 8, 9],
    "cell_data/number/line": [1],
    "cell_data/number/triangle": [2, 4, 5],
    "cell_data/number/quad": [3],
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("ending", ["vtk", "vtp"])
def test_polydata_comes_from_pyvista(mesh, ending, tmp_path):
    pytest.importorskip("pyvista")
    path = tmp_path / f"a.{ending}"
    if dist.get_rank() == 0:
        polydata(path)
    dist.barrier()
    for variable, values in POLYDATA.items():
        x = shardtensor.io.open(path, variable).read(..., mesh, [Shard(0)])
        assert_close(x.double(), torch.tensor(values).double())
    text = failing(shardtensor.io.open(path, "cells/tetra"), mesh)
    assert "there is no such variable; the file has points, point_data/heat" in text


# ---- errors -----------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("ending", ["vtk", "vtp"])
def test_polydata_without_pyvista(mesh, ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    if dist.get_rank() == 0:
        polydata(path)
    dist.barrier()
    kept = sys.modules.get("pyvista")
    sys.modules["pyvista"] = None
    try:
        text = failing(shardtensor.io.open(path, "points"), mesh)
    finally:
        sys.modules.pop("pyvista")
        if kept:
            sys.modules["pyvista"] = kept
    assert "pyvista is not installed" in text and f"{path} variable points" in text
    assert "pip install 'shardtensor[polydata]'" in text


def failing(array, mesh):
    with pytest.raises((ImportError, OSError, ValueError, TypeError)) as caught:
        array.read(..., mesh, [Shard(0)])
    texts = [None] * mesh.size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


@ranks(2)
@pytest.mark.parametrize(
    "name", [f"vtu, {n}" for n in ("raw", "raw, zlib", "base64", "inline, zlib")]
    + ["vtk 5.1", "stl", "stl, text"]
)  # fmt: skip
def test_files_that_end_too_early(mesh, name, tmp_path):
    path = written(name, tmp_path)
    if dist.get_rank() == 0:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
    dist.barrier()
    variable = "corners" if name in STL else "cells/triangle"
    text = failing(shardtensor.io.open(path, variable), mesh)
    assert f"shardtensor.io: cannot open {path} variable {variable}[...]: " in text or (
        f"shardtensor.io: cannot read {path} variable {variable}[" in text
    )
    told = ("ends", "facets", "hold", "has", "there is no array")
    assert any(part in text for part in told), text


@ranks(2)
def test_damaged_blocks_say_which_box(mesh, tmp_path):
    path = written("vtu, raw, zlib", tmp_path)
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        place = data.rfind(b"\x78\x9c")  # where the last compressed block begins
        data[place + 3 : place + 9] = b"\xff" * 6
        path.write_bytes(bytes(data))
    dist.barrier()
    text = failing(shardtensor.io.open(path, "cells/triangle"), mesh)
    assert "block 0 is damaged: " in text and "cannot open" in text

    path = written("vtu, base64", tmp_path)
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[data.find(b"\n_") + 700] = ord("?")
        path.write_bytes(bytes(data))
    dist.barrier()
    text = failing(shardtensor.io.open(path, "point_data/flow"), mesh)
    assert f"cannot read {path} variable point_data/flow[0:41, 0:2]: " in text
    assert text.endswith("(on mesh rank 0)")


@ranks(2)
def test_lines_that_say_no_number_say_which_box(mesh, tmp_path):
    path = tmp_path / "a.obj"
    if dist.get_rank() == 0:
        lines = [f"v {i} 0 {i}.5" for i in range(8)]
        lines[6] = "v 6 zero 6.5"
        path.write_text("\n".join([*lines, "f 1 2 3"]))
    dist.barrier()
    text = failing(shardtensor.io.open(path, "points"), mesh)
    assert f"ValueError: shardtensor.io: cannot read {path}" not in text
    assert f"shardtensor.io: cannot read {path} variable points[4:8, 0:3]: " in text
    assert "'zero'" in text and text.endswith("(on mesh rank 1)")
    text = failing(shardtensor.io.open(path, "cells/quad"), mesh)
    assert "there is no such variable; the file has points, cells/triangle" in text


@ranks(2)
def test_a_mesh_that_nobody_can_read(mesh, tmp_path):
    """meshio ends the process where no reader of its succeeds."""
    path = tmp_path / "a.vtk"
    if dist.get_rank() == 0:
        path.write_text("# vtk DataFile Version 4.2\nx\nASCII\nDATASET NOTHING\n")
    dist.barrier()
    text = failing(shardtensor.io.open(path, "points"), mesh)
    assert f"shardtensor.io: cannot open {path} variable points[...]: " in text
    missing = tmp_path / "missing.obj"
    text = failing(shardtensor.io.open(missing, "points"), mesh)
    assert (
        f"cannot open {missing} variable points[...]: " in text
        and "No such file" in text
    )


@ranks(2)
def test_a_file_that_only_one_rank_sees(mesh, tmp_path):
    path = written("obj", tmp_path)
    mine = path if dist.get_rank() == 0 else tmp_path / "other.obj"
    text = failing(shardtensor.io.open(mine, "points"), mesh)
    assert "other.obj" in text and text.endswith("(on mesh rank 1)")
    (tmp_path / "longer.obj").write_text(path.read_text() + "\nv 1 1 1")
    mine = path if dist.get_rank() == 0 else tmp_path / "longer.obj"
    with pytest.raises(ValueError, match="another one on some rank: it has"):
        shardtensor.io.open(mine, "points").read(..., mesh, [Shard(0)])
