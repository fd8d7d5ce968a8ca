"""How similar the head outputs of a layer are."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy import __version__
from mha_deploy.bundle.cases import read_npz
from mha_deploy.errors import DeployError, needed
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import INT32, Sizes, TensorSpec
from mha_deploy.output import TOOL, check_file, is_image, write_file

# -- Inputs from an .npz file, checked against the spec --------------------------------------------


def read_inputs(path: Path, spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Read the inputs of a layer, float32 or int32, from an .npz file; they must agree with the spec."""
    wanted = [tensor.name for tensor in spec.inputs]

    def check_names(names: Collection[str]) -> None:
        if sorted(names) != sorted(wanted):
            got, hint = ", ".join(sorted(names)) or "none", f"exactly: {', '.join(wanted)}"
            raise DeployError(f"The inputs do not match those of {spec.name}.", got=got, hint=hint)

    arrays = read_npz(path, check_names)
    sizes = {name: axis.min for name, axis in spec.axes.items() if not axis.is_dynamic}
    for tensor in spec.inputs:
        _check_array(tensor, arrays[tensor.name], sizes)
    spec.check_sizes(sizes)
    if spec.mask == "padding":
        lengths, longest = arrays["key_lengths"], sizes[spec.key_axis]
        if lengths.min() < 0 or lengths.max() > longest:
            got = f"key_lengths from {lengths.min()} to {lengths.max()}"
            what = "The number of valid keys of a batch element is out of range."
            raise DeployError(what, got=got, hint=f"0 to {longest}")
    types = {tensor.name: np.int32 if tensor.kind == INT32 else np.float32 for tensor in spec.inputs}
    return {name: arrays[name].astype(dtype) for name, dtype in types.items()}


def _check_array(tensor: TensorSpec, array: np.ndarray, sizes: dict[str, int]) -> None:
    """Compare type and shape with the spec; the first tensor that has an axis sets its size."""
    if not np.issubdtype(array.dtype, np.integer if tensor.kind == INT32 else np.floating):
        hint = "int32" if tensor.kind == INT32 else "float32 (BF16 has no .npz form)"
        raise DeployError(f"Input {tensor.name} has the wrong type.", got=array.dtype, hint=hint)
    # A mask may hold -inf; +inf and NaN mean nothing anywhere.
    allowed = np.isfinite(array) if tensor.name != "attention_bias" else (array < np.inf)
    if not allowed.all():
        raise DeployError(
            f"Input {tensor.name} holds values that are not finite.",
            got="NaN or infinity",
            hint="inputs without NaN and infinity",
        )
    wanted = f"({', '.join(str(dim) for dim in tensor.dims)})"
    if array.ndim == len(tensor.dims):
        for dim, size in zip(tensor.dims, array.shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
        if array.shape == tensor.shape(sizes):
            return
        known = ", ".join(f"{dim}={sizes[dim]}" for dim in tensor.dims if isinstance(dim, str))
        wanted += f" with {known}" if known else ""
    raise DeployError(f"Input {tensor.name} has the wrong shape.", got=array.shape, hint=wanted)


# -- The similarity of every pair of heads ---------------------------------------------------------

_CHUNK = 1024  # tokens at a time in float64: a long batch of a wide layer is gigabytes
_CELL_TEXT_UP_TO = 16  # heads; beyond that the numbers in the cells no longer fit


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadSimilarity:
    """The similarity ρ of every pair of heads."""

    # float64 [Hq, Hq], symmetric. Its diagonal is 1, or 0 for a head that is zero everywhere; ρ_ij is 0 too
    # where heads i and j are never both non-zero.
    matrix: np.ndarray
    redundancy: (
        float  # mean of |ρ_ij| over i ≠ j: 0 for orthogonal heads and for one head, 1 for parallel ones
    )
    pair: tuple[int, int] | None  # the heads with the largest |ρ_ij|, counted from 0; None for a single head
    tokens: int  # that took part: at least one head is not zero there
    attention: str = ""  # of a user's model: the attention that was compared
    others: Mapping[str, float] = field(default_factory=dict)  # and the redundancy of its other attentions

    @property
    def pair_similarity(self) -> float | None:
        """ρ of the most similar pair, with its sign."""
        return None if self.pair is None else float(self.matrix[self.pair])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "matrix": self.matrix.tolist(),
            "redundancy": self.redundancy,
            "most_similar_pair": None if self.pair is None else list(self.pair),
            "most_similar": self.pair_similarity,
            "tokens": self.tokens,
            **({"attention": self.attention, "others": dict(self.others)} if self.attention else {}),
        }

    def save_png(
        self,
        path: Path,
        *,
        title: str = "Head similarity",
        overwrite: bool = False,
        inputs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        """Draw ρ as a heatmap under a title with the redundancy; the file appears whole or not at all.

        A heatmap of this tool is replaced, any other file only with `overwrite`, and `inputs` never.
        """
        refuse_image(path, overwrite=overwrite, inputs=inputs)
        with needed("matplotlib is not installed.", "plot"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        Hq = len(self.matrix)
        side = min(12.0, max(4.5, 0.5 * Hq + 2.0))
        figure = Figure(figsize=(side + 0.8, side), layout="constrained")
        FigureCanvasAgg(figure)  # no window system, no global state of pyplot
        axes = figure.add_subplot()
        # Blue and red for opposite signs, with the range fixed: pictures of two layers can be compared.
        image = axes.imshow(self.matrix, vmin=-1.0, vmax=1.0, cmap="RdBu_r")
        figure.colorbar(image, ax=axes, label="ρ, mean cosine of head outputs", shrink=0.85)
        axes.set(xlabel="head", ylabel="head", title=f"{title}\nredundancy {self.redundancy:.3f}")
        ticks = range(0, Hq, max(1, Hq // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        if Hq <= _CELL_TEXT_UP_TO:
            for (row, column), value in np.ndenumerate(self.matrix.round(2) + 0.0):  # + 0.0: no "-0.00"
                color = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150, metadata={"Software": f"{TOOL} {__version__}"})
        write_file(path, drawn.getvalue(), is_image, overwrite=overwrite, inputs=inputs)


def refuse_image(
    path: Path, *, overwrite: bool = False, inputs: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Refuse a file that a heatmap cannot be written to."""
    if path.suffix.lower() != ".png":
        raise DeployError(
            "The heatmap is written as a PNG file.", got=path, hint=path.with_suffix(".png").name
        )
    real = check_file(path, is_image, overwrite=overwrite, inputs=inputs)
    if not real.parent.is_dir():
        hint = f"create {path.parent}, or name a file in an existing folder"
        raise DeployError("The heatmap cannot be written: there is no such folder.", got=path, hint=hint)


def random_feeds(spec: AttentionSpec, sizes: Sizes, seed: int) -> Mapping[str, Any]:
    """Random inputs to compare the heads on."""
    with needed("PyTorch is not installed.", "export"):
        from mha_deploy.reference.inputs import random_inputs
    return random_inputs(spec, sizes, seed)


def head_similarity(
    spec: AttentionSpec,
    inputs: Mapping[str, Any],
    *,
    seed: int = 0,
    weights: Path | None = None,
    prefix: str = "",
    layer: int | None = None,
) -> HeadSimilarity:
    """Compare the heads of a spec's layer, with random weights or those of an attention in a checkpoint.

    `inputs` are arrays or tensors by name, as `spec.inputs` lists them. The attention in the checkpoint is
    named by its prefix or by its layer.
    """
    with needed("PyTorch is not installed.", "export"):
        from mha_deploy.reference import build_module
        from mha_deploy.reference.weights import read_weights
    state = None if weights is None else read_weights(weights, spec, prefix=prefix, layer=layer)[0]
    return similarity_from_module(build_module(spec, seed=seed, weights=state), inputs)


def similarity_from_module(module: Any, inputs: Mapping[str, Any]) -> HeadSimilarity:
    """Compare the heads of a reference module in float32, for example one with trained weights."""
    import torch  # noqa: TID251 - heads are computed by the reference module, on the export side

    spec: AttentionSpec = module.spec
    tensors = {name: torch.as_tensor(array) for name, array in inputs.items()}
    query = tensors.pop(spec.inputs[0].name)  # its name differs between the graph and the module
    with torch.inference_mode():
        heads, _ = module.heads(query, **tensors)
    by_head = heads.numpy().reshape(*heads.shape[:2], spec.Hq, spec.D)
    if spec.mask != "padding" or spec.is_cross:
        return similarity_from_heads(by_head.reshape(-1, spec.Hq, spec.D))
    is_token = np.arange(heads.shape[1]) < np.asarray(inputs["key_lengths"])[:, None]  # not padding
    return similarity_from_heads(by_head[is_token])


def similarity_from_heads(heads: np.ndarray) -> HeadSimilarity:
    """Compare head outputs [tokens, Hq, D] that were computed elsewhere."""
    Hq = heads.shape[1]
    cosines, together, tokens = np.zeros((Hq, Hq)), np.zeros((Hq, Hq)), 0
    for start in range(0, len(heads), _CHUNK):
        chunk = heads[start : start + _CHUNK].astype(np.float64)
        norms = np.linalg.norm(chunk, axis=-1)
        if not np.isfinite(norms).all():
            raise DeployError(
                "A head output is not finite.",
                got="NaN or infinity",
                hint="inputs and weights without NaN and infinity",
            )
        alive = norms > 0
        unit = chunk / np.where(alive, norms, 1.0)[..., None]
        by_head = unit.transpose(1, 0, 2).reshape(Hq, -1)
        cosines += by_head @ by_head.T
        together += alive.T.astype(np.float64) @ alive.astype(np.float64)
        tokens += int(alive.any(axis=1).sum())
    if not tokens:
        what = "The heads are zero for every token: there is nothing to compare."
        raise DeployError(what, hint="inputs with queries that are not fully masked")
    matrix = np.clip(cosines / np.maximum(together, 1.0), -1.0, 1.0)
    if Hq == 1:
        return HeadSimilarity(matrix=matrix, redundancy=0.0, pair=None, tokens=tokens)
    first, second = np.triu_indices(Hq, k=1)
    size = np.abs(matrix[first, second])
    best = int(size.argmax())
    pair = (int(first[best]), int(second[best]))
    return HeadSimilarity(matrix=matrix, redundancy=float(size.mean()), pair=pair, tokens=tokens)
