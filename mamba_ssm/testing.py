"""What tests, benchmarks and self-tests share: input builders, error measures, the table of tolerances.

Letters: B batch, L length, D channels, N state size, H heads, P headdim, G groups.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor

FORWARD_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 6e-3,
    torch.float16: 1e-3,
}
GRADIENT_TOLERANCE = {**FORWARD_TOLERANCE, torch.float32: 2e-5}


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖, or ‖out‖ where the reference is zero; NaN if there is one in either."""
    wide = torch.complex128 if ref.is_complex() else torch.float64
    out, ref = out.detach().to(wide), ref.detach().to(wide)
    scale = torch.linalg.vector_norm(ref).item()
    return torch.linalg.vector_norm(out - ref).item() / (scale if scale > 0.0 else 1.0)


def assert_close(out: Tensor, ref: Tensor, tolerance: float, what: str = "output") -> None:
    """Raise AssertionError unless shapes agree and the relative error is at most `tolerance`."""
    if out.shape != ref.shape:
        raise AssertionError(f"{what}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}")
    error = relative_error(out, ref)
    if not error <= tolerance:
        raise AssertionError(f"{what}: relative error {error:.3e}, allowed {tolerance:.1e}")


@contextmanager
def in_case(case: object) -> Iterator[None]:
    """An AssertionError within it says of which case it is."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def outputs_and_gradients(
    function: Callable[..., Any], inputs: dict[str, Any], like: dict[str, Tensor] | None = None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Call `function(**inputs, **options)` and pull a fixed random cotangent back to every input that needs one.

    `like` are the outputs of another run: the cotangent is rounded to their dtypes, so that both runs get the same.
    -> outputs by position ("0", "1", ...), gradients by input name (zeros where an input had no influence)."""
    needing = {n: t for n, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}
    result = function(**inputs, **options)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator().manual_seed(0)
    pulled = {str(i): out for i, out in enumerate(outputs) if out.requires_grad}
    cotangents = [
        _random_like(out if like is None else like[i], generator).to(out.dtype) for i, out in pulled.items()
    ]
    grads = torch.autograd.grad(list(pulled.values()), list(needing.values()), cotangents, allow_unused=True)
    grads = {n: torch.zeros_like(needing[n]) if g is None else g for n, g in zip(needing, grads, strict=True)}
    return {str(i): out.detach() for i, out in enumerate(outputs)}, grads


def compare(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    forward: float,
    backward: float,
    **options: Any,
) -> None:
    """Assert that `function` and `reference` agree in every output and in the gradient of every input.

    The reference runs on float64 copies of the inputs."""
    wide = {name: to_float64(value) for name, value in inputs.items()}
    outs, grads = outputs_and_gradients(function, inputs, **options)
    ref_outs, ref_grads = outputs_and_gradients(reference, wide, like=outs, **options)
    for name, ref in ref_outs.items():
        assert_close(outs[name], ref, forward, f"output {name}")
    for name, ref in ref_grads.items():
        assert_close(grads[name], ref, backward, f"gradient of {name}")


def to_float64(value: Any) -> Any:
    """A floating-point tensor as a float64 (complex128) leaf with the same values; anything else as it is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to(wide).requires_grad_(value.requires_grad)


def selective_scan_inputs(
    batch: int = 2,
    channels: int = 4,
    length: int = 17,
    state: int = 3,
    groups: int | None = None,
    constant_B: bool = False,
    constant_C: bool = False,
    complex_A: bool = False,
    optional: Iterable[str] = ("D", "z", "delta_bias", "initial_state"),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keyword arguments of `selective_scan_fn`; groups None: B and C (B, N, L); `optional` may name "seq_idx" too."""
    make = _Maker(dtype, device, seed)
    wide = dtype if dtype == torch.float64 else torch.float32

    def variable_or_constant(constant: bool) -> Tensor:
        if constant:
            return make(channels, state, dtype=wide, is_complex=complex_A)
        columns = 2 * length if complex_A else length
        return make(batch, *([] if groups is None else [groups]), state, columns)

    inputs = {
        "u": make(batch, channels, length),
        "delta": make(batch, channels, length, scale=0.5),
        "A": make.decay(channels, state, dtype=wide, is_complex=complex_A),
        "B": variable_or_constant(constant_B),
        "C": variable_or_constant(constant_C),
    }
    extra = {
        "D": lambda: make(channels, dtype=wide),
        "z": lambda: make(batch, channels, length),
        "delta_bias": lambda: make(channels, dtype=wide, scale=0.5),
        "initial_state": lambda: make(batch, channels, state, dtype=wide, is_complex=complex_A),
        "seq_idx": lambda: make.seq_idx(batch, length),
    }
    return inputs | {name: extra[name]() for name in optional}


def ssd_inputs(
    batch: int = 2,
    length: int = 17,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    state: int = 5,
    D_has_hdim: bool = False,
    optional: Iterable[str] = ("D", "z", "dt_bias", "initial_states"),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keyword arguments of `mamba_chunk_scan_combined` but chunk_size; `optional` may name "seq_idx" too."""
    make = _Maker(dtype, device, seed)
    wide = dtype if dtype == torch.float64 else torch.float32
    inputs = {
        "x": make(batch, length, heads, headdim),
        "dt": make(batch, length, heads, scale=0.5),
        "A": make.decay(heads, dtype=wide),
        "B": make(batch, length, groups, state),
        "C": make(batch, length, groups, state),
    }
    extra = {
        "D": lambda: make(*((heads, headdim) if D_has_hdim else (heads,)), dtype=wide),
        "z": lambda: make(batch, length, heads, headdim),
        "dt_bias": lambda: make(heads, dtype=wide, scale=0.5),
        "initial_states": lambda: make(batch, heads, headdim, state, dtype=wide),
        "seq_idx": lambda: make.seq_idx(batch, length),
    }
    return inputs | {name: extra[name]() for name in optional}


class _Maker:
    """Random leaves of one dtype on one device from one seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None, is_complex: bool = False
    ) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        drawn = torch.complex128 if is_complex else torch.float64
        values = torch.randn(shape, generator=self.generator, dtype=drawn) * scale
        return values.to(self.device, dtype.to_complex() if is_complex else dtype).requires_grad_()

    def decay(self, *shape: int, dtype: torch.dtype, is_complex: bool = False) -> Tensor:
        """Negative real parts between -1.1 and -0.1."""
        values = -torch.rand(shape, generator=self.generator, dtype=torch.float64) - 0.1
        if is_complex:
            values = torch.complex(values, torch.randn(shape, generator=self.generator, dtype=torch.float64))
        return values.to(self.device, dtype.to_complex() if is_complex else dtype).requires_grad_()

    def seq_idx(self, batch: int, length: int) -> Tensor:
        """Pieces of random lengths; indices recur, so that only changes count."""
        starts = torch.rand(batch, length, generator=self.generator) < 0.2
        return (starts.cumsum(dim=1) % 3).to(self.device, torch.int32)


def _random_like(out: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.complex128 if out.is_complex() else torch.float64
    return torch.randn(out.shape, generator=generator, dtype=drawn).to(out.device, out.dtype)


class NoHostSync(TorchDispatchMode):
    """Within it every operation that would make the host wait for a device's values raises, on any device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.WAITING:
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))
