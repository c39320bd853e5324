"""What lies below a durable root, looked at without the engine."""

from __future__ import annotations

from pathlib import Path

__all__ = ["data_files", "flip_a_bit", "generations", "leftovers"]


def generations(root: Path) -> dict[str, list[Path]]:
    """Key -> directories of its generations, whether they are committed or not."""
    found: dict[str, list[Path]] = {}
    for folder in sorted((root / "bundles").rglob("@*")):
        found.setdefault(str(folder.parent.relative_to(root / "bundles")), []).append(folder)
    return found


def data_files(root: Path, key: str) -> list[Path]:
    """All files of the bundle ``key``."""
    return sorted(path for path in (root / "bundles" / key).rglob("*") if path.is_file())


def leftovers(root: Path, keys: set[str]) -> list[str]:
    """What lies below ``root`` although it belongs to none of the committed bundles ``keys``, one server being open."""
    found = []
    for key, folders in generations(root).items():
        whole = [folder for folder in folders if (folder / "manifest.ocdbt").is_file()]
        found += [f"{key}: {len(whole)} committed generations"] if key in keys and len(whole) != 1 else []
        found += [
            str(folder.relative_to(root)) for folder in folders if key not in keys or folder not in whole
        ]
    for path in (root / "bundles").rglob("*"):
        inside = any(part.startswith("@") for part in path.relative_to(root).parts)
        if path.is_file() and (not inside or "lock" in path.name):
            found.append(str(path.relative_to(root)))
        if path.is_dir() and inside and not any(path.iterdir()):
            found.append(f"empty {path.relative_to(root)}")
    known = {"bundles", "programs", "writers", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}
    found += [path.name for path in root.iterdir() if path.name not in known and not _is_empty(path)]
    writers = [path.name for path in (root / "writers").iterdir() if path.name != "door"]
    found += [f"{len(writers)} writers: {writers}"] if len(writers) != 1 else []
    return found


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def flip_a_bit(root: Path, key: str) -> None:
    """Damage the bytes of the leaves of a bundle, in the middle of its largest file."""
    file = max(data_files(root, key), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
