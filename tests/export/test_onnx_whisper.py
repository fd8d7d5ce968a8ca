"""Whisper and BERT as other exporters write them go from `.onnx` to a validated engine, with one command."""

import pytest
import torch
from torch import nn

import mha_deploy as md

transformers = pytest.importorskip("transformers")


def sharp(model):
    """Weights with which attention is not flat."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)


def whisper():
    config = transformers.WhisperConfig(
        **{"vocab_size": 101, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 40},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 64, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    return sharp(transformers.WhisperForConditionalGeneration(config))


class Calls(nn.Module):
    """A part of a model behind a function of tensors."""

    def __init__(self, part, call):
        super().__init__()
        self.part, self.call = part, call

    def forward(self, *tensors):
        return self.call(self.part, *tensors)


def encoder():
    part = Calls(whisper().model.encoder, lambda part, mel: part(mel).last_hidden_state)
    return part, {"input_features": (torch.randn(2, 16, 80), ("batch",))}, 2


def decoder():
    def call(part, ids, states):
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        hidden = part.model.decoder(encoder_hidden_states=states, **given).last_hidden_state
        return part.proj_out(hidden)

    ids, states = torch.randint(3, 100, (2, 6)), torch.randn(2, 40, 64)
    inputs = {"input_ids": (ids, ("batch", "sequence")), "encoder_hidden_states": (states, ("batch",))}
    return Calls(whisper(), call), inputs, 4


def bert():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    model = sharp(transformers.BertModel(transformers.BertConfig(vocab_size=97, **sizes)))
    call = Calls(model, lambda part, ids, mask: part(input_ids=ids, attention_mask=mask).last_hidden_state)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    axes = ("batch", "sequence")
    return call, {"input_ids": (torch.randint(3, 97, (2, 6)), axes), "attention_mask": (mask, axes)}, 2


def written(make, path, *, dynamo):
    """The file that PyTorch's own exporter writes in opset 17, and how many attentions it has."""
    model, inputs, attentions = make()
    names = {name: dict(enumerate(axes)) for name, (_, axes) in inputs.items()}
    options = {"dynamic_axes": {**names, "y": next(iter(names.values()))}}
    if dynamo:
        dims = {
            "batch": torch.export.Dim("batch", max=8),
            "sequence": torch.export.Dim("sequence", min=2, max=64),
        }
        shapes = tuple({axis: dims[name] for axis, name in each.items()} for each in names.values())
        options = {"dynamic_shapes": (shapes,), "verbose": False}
    torch.onnx.export(
        model.eval(),
        tuple(tensor for tensor, _ in inputs.values()),
        path,
        input_names=list(inputs),
        output_names=["y"],
        opset_version=17,
        dynamo=dynamo,
        **options,
    )
    return attentions


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("make", [encoder, decoder, bert])
def test_from_the_file_to_a_validated_engine(make, dynamo, tmp_path, run_cli):
    pytest.importorskip("tensorrt_rtx")
    attentions = written(make, tmp_path / "model.onnx", dynamo=dynamo)
    options = ("--backend", "tensorrt-rtx", "--sm", "89", "-o", tmp_path / "bundle")
    done = run_cli("deploy", tmp_path / "model.onnx", *options)
    assert done.code == 0, done.err
    assert f"{attentions}/{attentions} fused" in " ".join(done.out.split())
    found = md.bisect(tmp_path / "bundle", "ort-cpu")
    assert found.wrong is None
