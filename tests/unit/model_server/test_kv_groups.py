"""KV cache groups: layers with the same window that share one block table."""

from hypothesis import given
from hypothesis import strategies as st

from model_server.attention import KvLayout
from model_server.shapes.shape import KvGroupSpec, kv_groups, single_group


def test_a_model_of_one_kind_has_one_group() -> None:
    """Layers with the same window, or none, form a single group."""
    assert kv_groups([None, None]) == (KvGroupSpec("full_attention", None, (0, 1)),)
    assert kv_groups([8, 8]) == (KvGroupSpec("sliding_window", 8, (0, 1)),)


def test_gemmas_layers_fall_into_groups_of_equal_length() -> None:
    """Gemma's 26 layers form one full-attention group of 4 and window groups of 4."""
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]
    groups = kv_groups(windows)
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 4, 2]
    full = [group for group in groups if group.kind == "full_attention"]
    assert full == [KvGroupSpec("full_attention", None, (5, 11, 17, 23))]
    assert KvLayout(groups, 10, 16).num_planes == 4


def test_a_little_padding_is_better_than_many_groups() -> None:
    """Two kinds of nearly equal length form one group each, with a little padding."""
    groups = kv_groups([8, None] * 5 + [8])
    assert [len(group.layers) for group in groups] == [6, 5]


@given(st.lists(st.sampled_from([None, 4, 16]), min_size=1, max_size=40))
def test_every_layer_has_one_place_of_its_own(windows: list[int | None]) -> None:
    """Every layer is in one group of its window, and groups have no plane twice."""
    for groups in (kv_groups(windows), single_group(len(windows))):
        layout = KvLayout(groups, num_blocks=8, block_tokens=4)
        places = layout.places()
        assert sorted(places) == list(range(len(windows)))
        assert len(set(places.values())) == len(windows)
        assert all(plane < layout.num_planes for _, plane in places.values())
    for group in kv_groups(windows):
        assert {windows[layer] for layer in group.layers} == {group.window_tokens}
        assert (group.kind == "sliding_window") == (group.window_tokens is not None)
