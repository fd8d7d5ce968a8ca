"""A part of a module that `forward` itself casts to another type, as the routers of some experts are."""

import pytest
import torch
from torch import nn

import mha_deploy as md


class Routed(nn.Module):
    """Two experts for every token, weighted by a router in float32."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.Linear(16, 32)

    def forward(self, x):
        self.router = self.router.to(torch.float32)
        weights = self.router(x.float()).softmax(-1).to(x.dtype)
        return (self.experts(x).unflatten(-1, (2, 16)) * weights[..., None]).sum(-2)


@pytest.mark.slow
def test_it_is_exported_where_it_has_the_type_already(tmp_path):
    def made():
        torch.manual_seed(0)
        inputs = {"x": md.Example(torch.randn(2, 5, 16), "B")}
        return md.Deployable(module=Routed(), inputs=inputs, axes={"B": "1:2:4"}, name="routed")

    with pytest.raises(md.DeployError, match='precision="auto"'):
        md.export(made(), tmp_path / "half", precision="fp16", golden=("opt",))
    bundle = md.export(made(), tmp_path / "mixed", precision="auto", golden=("opt",))
    assert [entry.name for entry in bundle.manifest.golden] == ["opt"]
