"""Reading and writing a model's folder: config.json and the weights, without executing anything that is in them.

Names that are no folder are looked up on the hub if its client (huggingface_hub) is installed.
"""

import importlib.util
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Tensor = torch.Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"


def load_config_hf(model_name: str | os.PathLike) -> dict[str, Any]:
    """The dictionary in config.json of the folder `model_name`."""
    path = _find(model_name, (CONFIG_NAME,))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}, expected an object with the model's configuration")
    return values


def load_state_dict_hf(
    model_name: str | os.PathLike, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The weights in model.safetensors or pytorch_model.bin of the folder `model_name`.

    dtype None keeps the file's, else floating-point weights are converted. A file that holds anything but tensors and
    plain values is refused with ValueError, and nothing in it is executed."""
    path = _find(model_name, (SAFE_WEIGHTS_NAME, WEIGHTS_NAME))
    tensors = _read_safetensors(path) if path.name == SAFE_WEIGHTS_NAME else _read_pickled(path)
    target = torch.device("cpu" if device is None else device)
    return {
        name: tensor.to(target, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }


def save_model_folder(
    folder: str | os.PathLike, config: dict[str, Any], state_dict: dict[str, Tensor], safe_serialization: bool = False
) -> None:
    """Write config.json and pytorch_model.bin, or with safe_serialization model.safetensors; each is replaced whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
    if safe_serialization:
        save_file = _safetensors(folder).torch.save_file
        _replace(folder / SAFE_WEIGHTS_NAME, lambda path: save_file(tensors, path))
        (folder / WEIGHTS_NAME).unlink(missing_ok=True)
    else:
        _replace(folder / WEIGHTS_NAME, lambda path: torch.save(tensors, path))
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
    text = json.dumps(config, indent=4, sort_keys=True) + "\n"
    _replace(folder / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    unfinished = path.with_name(path.name + ".part")
    write(unfinished)
    os.replace(unfinished, path)


def _find(model_name: str | os.PathLike, names: tuple[str, ...]) -> Path:
    """The first of `names` in the folder, or on the hub."""
    folder = Path(model_name)
    if folder.is_dir():
        for name in names:
            if (folder / name).is_file():
                return folder / name
        raise FileNotFoundError(f"{folder}: has no {' or '.join(names)}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FileNotFoundError(f"{folder}: no such folder; names on the hub need: pip install huggingface_hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in names[:-1]:
        try:
            return Path(hf_hub_download(str(model_name), name))
        except EntryNotFoundError:
            continue                                         # the next format
    return Path(hf_hub_download(str(model_name), names[-1]))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    safetensors = _safetensors(path)
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def _safetensors(path: Path) -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{path}: needs the package safetensors: pip install safetensors") from error
    return safetensors


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, holds more than tensors and plain values; nothing was executed") from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: holds no dictionary of tensors, expected a model's state dict")
    return tensors
