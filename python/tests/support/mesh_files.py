"""Meshes in files of every form that is read by piece."""

import base64
import io
import lzma
import zlib
from pathlib import Path

import meshio
import numpy as np

COMPRESSORS = {
    None: (None, None),
    "zlib": ("vtkZLibDataCompressor", zlib.compress),
    "lzma": ("vtkLZMADataCompressor", lzma.compress),
}
BLOCK = 1000  # bytes, so that small files have several


def surface(rows=9):
    """Points on a grid, triangles, quads between them, triangles again."""
    grid = np.stack(np.meshgrid(range(rows), range(rows), indexing="ij"), -1)
    heights = np.sin(grid.sum(-1, keepdims=True))
    points = np.concatenate([grid, heights], -1).reshape(-1, 3) / 8
    corner = np.arange(rows * rows).reshape(rows, rows)
    a, b = corner[:-1, :-1].ravel(), corner[1:, :-1].ravel()
    c, d = corner[1:, 1:].ravel(), corner[:-1, 1:].ravel()
    third = len(a) // 3
    triangles = np.stack([a, b, c], -1)
    quads = np.stack([a, b, c, d], -1)
    cells = [
        ("triangle", triangles[:third]),
        ("quad", quads[third : 2 * third]),
        ("triangle", triangles[2 * third :]),
    ]
    heat = points.sum(-1).astype("f4")
    kinds = [np.arange(len(rows)) + 100 * i for i, (_, rows) in enumerate(cells)]
    return meshio.Mesh(
        points, cells, point_data={"heat": heat, "flow": points[:, :2]},
        cell_data={"number": kinds},
    )  # fmt: skip


def triangles(rows=9):
    """The same in triangles alone, which are all that STL knows."""
    mesh = surface(rows)
    cells = np.concatenate([block.data[:, :3] for block in mesh.cells])
    return meshio.Mesh(mesh.points, [("triangle", cells)])


# ---- VTU --------------------------------------------------------------------


class Vtu:
    """Writes what meshio does not: appended data, raw or in base64, other headers and
    orders of bytes; `inline` as VTK does."""

    def __init__(self, place="appended", encoding="raw", compressor=None,
                 header="UInt32", order="<"):  # fmt: skip
        self.place, self.encoding, self.header = place, encoding, header
        self.name, self.compress = COMPRESSORS[compressor]
        self.order = order
        self.appended = io.BytesIO()

    def write(self, mesh, path):
        types = {"triangle": 5, "quad": 9, "wedge": 13}
        kinds = np.concatenate(
            [np.full(len(b.data), types[b.type], np.uint8) for b in mesh.cells]
        )
        order = [0, 2, 1, 3, 5, 4]
        rows = [b.data[:, order] if b.type == "wedge" else b.data for b in mesh.cells]
        corners = np.concatenate([r.ravel() for r in rows])
        ends = np.cumsum(np.concatenate([[r.shape[1]] * len(r) for r in rows]))
        cell_data = {k: np.concatenate(v) for k, v in mesh.cell_data.items()}
        order = "LittleEndian" if self.order == "<" else "BigEndian"
        compressor = f' compressor="{self.name}"' if self.name else ""
        parts = [
            '<?xml version="1.0"?>\n<!-- a > b -->\n<VTKFile type="UnstructuredGrid" '
            f'version="1.0" byte_order="{order}" header_type="{self.header}"'
            f"{compressor}>\n<UnstructuredGrid>\n<FieldData>"
            '<DataArray type="Float64" Name="TimeValue" NumberOfTuples="1" '
            'format="ascii">0.5</DataArray></FieldData>'
            f'<Piece NumberOfPoints="{len(mesh.points)}" NumberOfCells="{len(kinds)}">'
        ]
        for section, arrays in (
            ("PointData", mesh.point_data),
            ("CellData", cell_data),
            ("Points", {"Points": mesh.points}),
            ("Cells", {"connectivity": corners, "offsets": ends, "types": kinds}),
        ):
            told = [self.array(name, values) for name, values in arrays.items()]
            parts += [f"<{section}>", *told, f"</{section}>"]
        parts.append("</Piece></UnstructuredGrid>\n")
        text = "".join(parts).encode()
        if self.place == "appended":
            text += f'<AppendedData encoding="{self.encoding}">\n_'.encode()
            text += self.appended.getvalue() + b"\n</AppendedData>"
        path.write_bytes(text + b"</VTKFile>\n")

    def array(self, name, values):
        dtype = values.dtype
        kind = {"f": "Float", "i": "Int", "u": "UInt"}[dtype.kind]
        told = f'<DataArray type="{kind}{8 * dtype.itemsize}" Name="{name}"'
        if values.ndim == 2:
            told += f' NumberOfComponents="{values.shape[1]}"'
        stored = self.stored(values.astype(dtype.newbyteorder(self.order)).tobytes())
        if self.place == "inline":
            return f'{told} format="binary">\n{stored.decode()}\n</DataArray>\n'
        offset = self.appended.tell()
        self.appended.write(stored)
        # VTK writes ranges within the tag of an array, too.
        return (
            f'{told} format="appended" offset="{offset}">'
            '<InformationKey name="L2_NORM_RANGE"/></DataArray>'
        )

    def stored(self, numbers):
        if not self.name:
            size = self.sizes(len(numbers))
            raw = self.encoding == "raw" and self.place == "appended"
            return size + numbers if raw else base64.b64encode(size + numbers)
        blocks = [numbers[i : i + BLOCK] for i in range(0, len(numbers), BLOCK)]
        packed = [self.compress(block) for block in blocks]
        last = len(numbers) % BLOCK
        head = self.sizes(len(blocks), BLOCK, last, *map(len, packed))
        if self.encoding == "raw" and self.place == "appended":
            return head + b"".join(packed)
        return base64.b64encode(head) + base64.b64encode(b"".join(packed))

    def sizes(self, *numbers):
        size = int(self.header.removeprefix("UInt")) // 8
        return np.array(numbers, f"{self.order}u{size}").tobytes()


VTU = {
    "raw": {},
    "raw, big-endian": {"order": ">", "header": "UInt64"},
    "raw, zlib": {"compressor": "zlib"},
    "base64": {"encoding": "base64"},
    "base64, zlib, 64-bit sizes": {
        "encoding": "base64", "compressor": "zlib", "header": "UInt64",
    },
    "base64, lzma": {"encoding": "base64", "compressor": "lzma"},
    "inline": {"place": "inline", "header": "UInt64"},
    "inline, zlib": {"place": "inline", "compressor": "zlib"},
}  # fmt: skip


# ---- all --------------------------------------------------------------------


def _vtu(name):
    return "vtu", lambda mesh, path: Vtu(**VTU[name]).write(mesh, path)


def _by_meshio(ending, **options):
    return ending, lambda mesh, path: mesh.write(path, **options)


def _obj(mesh, path):
    """With groups, normals and corners that name them."""
    lines = ["# a surface", "o it"]
    lines += [f"v {x!r}  {y!r} {z!r}" for x, y, z in mesh.points.tolist()]
    lines += [f"\tvn {i} 0.5 -1e-3" for i in range(len(mesh.points))]
    for number, block in enumerate(mesh.cells):
        lines += [f"g group{number}", "s off"] if number else []
        form = ["{}", "{}//{}", "{}/2/{}"][number % 3]
        lines += ["f " + " ".join(form.format(c + 1, c + 1) for c in row)
                  for row in block.data]  # fmt: skip
    path.write_text("\n".join(lines))  # the last line ends nowhere


# name: (ending, write, whether STL's triangles alone)
BY_PIECE = {
    **{f"vtu, {name}": _vtu(name) for name in VTU},
    "vtu, meshio's zlib": _by_meshio("vtu", compression="zlib"),
    "vtu, meshio's lzma": _by_meshio("vtu", compression="lzma"),
    "vtu, meshio's uncompressed": _by_meshio("vtu", compression=None),
    "vtk 5.1": _by_meshio("vtk", file_format="vtk"),
    "vtk 4.2": _by_meshio("vtk", file_format="vtk42"),
    "obj": ("obj", _obj),
}
WHOLE = {
    "vtu, text": _by_meshio("vtu", binary=False),
    "vtk, text": _by_meshio("vtk", binary=False),
}


# ---- what a rank reads ------------------------------------------------------


def given():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def bytes_of(fn):
    """What the system has given to this process meanwhile, and the result."""
    before = given()
    result = fn()
    return given() - before, result
