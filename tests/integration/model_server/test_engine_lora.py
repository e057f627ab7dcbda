"""LoRA adapters in a running engine: correct outputs, and no sharing of blocks between adapters."""

from pathlib import Path

import pytest
import torch

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.errors import RequestError
from model_server.kv_events.events import BlockStored
from model_server.requests import EngineCoreRequest, SamplingParams
from tests.support.model_server.engine import EventLog, Outputs, checking_engine, request, run_to_end
from tests.support.model_server.lora import merged, save_adapter
from tests.support.model_server.model import save_reference, text_of

PROMPT = text_of(21)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def asking(name: str, lora_name: str | None, salt: str | None = None) -> EngineCoreRequest:
    """Return a greedy request for a fixed prompt."""
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    return EngineCoreRequest(name, tuple(PROMPT), sampling, salt, lora_name)


def new_engine(directory: Path, events: EventLog) -> EngineCore:
    """Return an engine for a checkpoint."""
    return build_engine(EngineConfig(model=str(directory), block_tokens=4, gpu_blocks=64), events.publish)


def test_requests_of_base_and_adapters_run_together(tmp_path: Path) -> None:
    """In a mixed batch, each output equals that of the base model or of the merged weights."""
    base = save_reference(tmp_path / "base")
    engine = new_engine(tmp_path / "base", EventLog())
    want = {}
    models = {None: base}
    for index, name in enumerate(("sql", "chat")):
        directory = save_adapter(tmp_path / name, base, seed=index)
        engine.loras.load(name, directory)
        models[name] = merged(base, directory)
    outputs = Outputs()
    for name, model in models.items():
        engine.add_request(asking(str(name), name), outputs)
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        want[str(name)] = ids[0, len(PROMPT) :].tolist()
    run_to_end(engine)
    assert outputs.tokens == want
    assert len({tuple(tokens) for tokens in want.values()}) == 3


def test_blocks_are_shared_only_within_one_adapters_content(tmp_path: Path) -> None:
    """Blocks are shared neither with the base model nor between adapters of different content."""
    base = save_reference(tmp_path / "base")
    events = EventLog()
    engine = new_engine(tmp_path / "base", events)
    loras = engine.loras
    outputs = Outputs()

    def cached(name: str, lora_name: str | None, salt: str | None = None) -> int:
        engine.add_request(asking(name, lora_name, salt), outputs)
        run_to_end(engine)
        return outputs.last[name].cached_tokens

    sql = loras.load("sql", save_adapter(tmp_path / "sql", base))
    assert cached("a", None) == 0
    assert cached("b", "sql") == 0
    assert cached("c", "sql") == 20
    assert cached("d", "sql", "tenant") == 0
    loras.unload("sql")
    loras.load("sql", save_adapter(tmp_path / "sql", base, seed=1))
    assert cached("e", "sql") == 0
    loras.unload("sql")
    loras.load("sql", save_adapter(tmp_path / "sql", base))
    assert cached("f", "sql") == 20
    stored = [event for batch in events.batches for event in batch if isinstance(event, BlockStored)]
    assert (stored[0].lora_id, stored[0].lora_name) == (None, None)
    of_sql = next(event for event in stored if event.lora_name == "sql")
    assert (of_sql.lora_id, of_sql.extra_keys) == (sql.lora_id, [["sql"]] * 5)
    salted = next(event for event in stored if event.extra_keys and event.extra_keys[0] == ["sql", "tenant"])
    assert salted.extra_keys[1:] == [["sql"]] * 4  # type: ignore[index]


def test_unloading_spares_running_requests(tmp_path: Path) -> None:
    """A running request keeps its adapter after an unload; new requests for it are rejected."""
    base = save_reference(tmp_path / "base")
    engine = new_engine(tmp_path / "base", EventLog())
    engine.loras.load("sql", save_adapter(tmp_path / "sql", base))
    outputs = Outputs()
    engine.add_request(asking("whole", "sql"), outputs)
    run_to_end(engine)
    engine.add_request(asking("cut", "sql"), outputs)
    engine.step()
    engine.loras.unload("sql")
    run_to_end(engine)
    assert outputs.tokens["cut"] == outputs.tokens["whole"]
    with pytest.raises(RequestError, match="no adapter 'sql'"):
        engine.add_request(asking("late", "sql"), outputs)


def test_unknown_adapter_names_are_rejected() -> None:
    """An engine without the named adapter rejects the request instead of using the base model."""
    engine, _, _ = checking_engine()
    item = request("a", [1, 2, 3])
    with pytest.raises(RequestError, match="no adapter 'sql' is loaded"):
        engine.add_request(
            EngineCoreRequest("a", item.prompt_token_ids, item.sampling, None, "sql"), Outputs()
        )
