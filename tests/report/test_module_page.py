"""The page of a user's own model: its attentions one by one, and what holds for all of them once."""

import copy
import dataclasses
import re

import pytest
from example_report import fresh
from example_results import break_verdict, parity, verdict

from mha_deploy.model.layer import AttentionSpec, GroupedMlp, Rope, SparseHeads
from mha_deploy.model.spec import ON_DISK, Axis, ModuleSpec
from mha_deploy.report.page import report_page
from mha_deploy.report.table import COLUMNS
from mha_deploy.text import group_by, summarize_names, without_hash, without_numbers

NAMES = [f"blocks.{i}.attention" for i in range(3)]


def module_report(*, wrong=()):
    """A report on a module of three attentions."""
    data = fresh("cpu-only")
    tensor = {"name": "tokens", "kind": "int64", "dims": ["B", "S", 64]}
    spec = {"name": "encoder", "factory": "f.py:encoder", "attentions": 3, "tensors_in": [tensor, tensor]}
    data["model"] |= {"name": "encoder", "kind": "module", "spec": spec}
    run = parity("ort-cpu 1.31.1", 0.1) | {"cases": "layers"}
    run["verdicts"] = [verdict("layers", 8, 128, 0.1) | {"output": name} for name in NAMES]
    for index in wrong:
        break_verdict(run["verdicts"][index], 8.05)
    run["outcome"] = "failed" if wrong else "passed"
    data["parity"].append(run)
    data["range"] = fresh("passing")["range"] | {
        "nodes": [range_node(name, 7000 + i) for i, name in enumerate(NAMES)]
    }
    return data


def range_node(name, size):
    node = copy.deepcopy(fresh("passing")["range"]["nodes"][0])
    node["findings"][0] |= {"what": f"the matmul reaches {size:,}", "numbers": {"largest": size}}
    return node | {"node": name, "headroom": 65504 / size}


def words(page):
    shown = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", shown))


def between(text, start, end):
    return text.split(start, 1)[1].split(end, 1)[0]


@pytest.mark.parametrize(("wrong", "reported"), [((), "3/3"), ((1,), "2/3")])
def test_the_figures_say_how_many_attentions_are_right(wrong, reported):
    text = words(report_page(module_report(wrong=wrong)))
    assert f"attention module, {reported} attentions right" in text
    assert "checked 5 of 5 outputs right" in text


def test_what_the_model_does_not_have_takes_no_row():
    data = module_report()
    axes, tensors = {"S": Axis(min=1, opt=8, max=16)}, {"inputs": (), "outputs": ()}
    encoder = ModuleSpec(name="encoder", axes=axes, **tensors, attention_count=3, factory="f.py:encoder")
    data["model"]["spec"] = encoder.to_dict()
    text = words(report_page(data)).split("origin of weights")[1]
    assert "f.py:encoder" in text
    assert "S 1:8:16" in text
    assert not [each for each in ("KV cache", "longest", "FLOP", "prefix of weights") if each in text]
    data["model"]["spec"] |= {"cached": {"past": "present"}, "longest": 64}
    text = words(report_page(data)).split("origin of weights")[1]
    assert "past present" in text
    assert "longest sequence 64" in text


def test_the_runtime_in_which_the_fewest_are_right_is_reported():
    data = module_report()
    data["parity"] += module_report(wrong=(0, 2))["parity"][1:]
    assert "module, 1/3 attentions right" in words(report_page(data))


def test_a_module_whose_attentions_were_not_judged_only_counts_them():
    data = module_report()
    data["parity"].pop()
    page = report_page(data)
    assert "attention module, 3 attentions " in words(page)
    assert "Every attention by itself" not in page


@pytest.mark.parametrize("spec", [AttentionSpec, ModuleSpec])
def test_every_field_of_a_model_has_words(spec):
    data, fields = fresh("passing"), {ON_DISK.get(each.name, each.name) for each in dataclasses.fields(spec)}
    nested = {each.name: 7 for kind in (Rope, SparseHeads, GroupedMlp) for each in dataclasses.fields(kind)}
    data["model"]["spec"] = dict.fromkeys(fields - {"name", "summary", "axes"}, 3) | {"rope": nested}
    shown = words(report_page(data))
    raw = [name for name in (*fields, *nested) if "_" in name or name in ("Hq", "Hkv", "D", "E")]
    assert raw
    assert [name for name in raw if f" {name} " in shown] == []


def test_the_evidence_of_an_engine_is_in_words_and_explained():
    page = report_page(fresh("passing"))
    nodes = [node for engine in fresh("passing")["engines"] for node in engine["nodes"]]
    sources = {source for node in nodes for source in node["sources"]}
    assert sources
    assert not [source for source in sources if f">{source}<" in page]
    for word in ("build log", "inspector"):
        assert word in COLUMNS["evidence"]


def test_a_number_of_keys_is_a_whole_number():
    data = module_report()
    for node in data["range"]["nodes"]:
        node["max_keys"] = 64
    shown = words(report_page(data))
    assert " 64 " in between(shown, "keys at most", "Not part")
    assert " 64.0 " not in shown


def test_attentions_have_a_table_of_their_own():
    page = report_page(module_report(wrong=(1,)))
    table = between(page, "<caption>Every attention by itself, against its own oracle</caption>", "</table>")
    assert re.findall(r"<code>([^<]+)</code>", table) == NAMES[1:2]
    assert "ort-cpu 1.31.1 at B=8, S=128" in table
    folded = between(page.split("<caption>Every attention", 1)[1], "<details>", "</details>")
    assert re.findall(r"<code>([^<]+)</code>", folded) == [NAMES[0], NAMES[2]]
    assert folded.count("passed</span>") == 2
    assert "over budget: rel. L2, gain; worst element [0, 64, 511]" in table
    outputs = between(page, "Error of every output, and its share of the budget</caption>", "</details>")
    assert "blocks" not in outputs


def test_what_is_true_of_all_attentions_is_said_once_with_the_numbers_of_the_worst():
    text = words(report_page(module_report()))
    assert text.count("Advice: fold the scale into the query weights") == 1
    assert "blocks.2.attention and 2 more : the matmul reaches 7,002. Advice:" in text


def test_tensors_are_listed_with_their_dimensions():
    text = words(report_page(module_report()))
    assert "inputs tokens int64 [B, S, 64]; tokens int64 [B, S, 64]" in text


# -- the same but for a number ---------------------------------------------------------------------


def test_names_of_equal_layers_are_alike():
    assert without_numbers("blocks.3.attn.0") == without_numbers("blocks.11.attn.0") == "blocks.#.attn.#"
    assert without_numbers("blocks.3.cross") != without_numbers("blocks.3.self")
    assert without_numbers("at most -65,504.5 or 1.2e-05") == "at most -# or #"


def test_kernels_are_alike_without_their_hash_but_not_without_their_version():
    one, other = (f"_gemm_mha_v2_0x{digit * 32}" for digit in "ab")
    assert without_hash(one) == without_hash(other) == "_gemm_mha_v2_…"
    assert without_hash("_gemm_mha_v1_0x" + "a" * 32) != without_hash(one)
    assert without_hash("__myl_MulAdd_myl0_9") == without_hash("__myl_MulAdd_myl0_12")


def test_groups_keep_the_order_in_which_they_are_met():
    assert group_by([3, 1, 4, 6, 5], lambda n: n % 2) == [[3, 1, 5], [4, 6]]
    assert (summarize_names(["a"]), summarize_names(["a", "b", "c"])) == ("a", "a and 2 more")
