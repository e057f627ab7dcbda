"""Early loop exit in templates: a searching loop ends once further iterations have no effect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.utils import Namespace

from tests.support.paths import ROOT
from tokenization.templates.analysis import with_early_exit
from tokenization.templates.chat_template import ENVIRONMENT, ChatTemplate, while_set

SEARCH = """\
{% for m in messages[::-1] %}{% set place = (messages | length - 1) - loop.index0 %}
{%- if ns.searching and m.role == 'user' %}{% set ns.searching = false %}{% set ns.at = place %}{%- endif %}
{%- endfor %}"""


def search(source: str) -> nodes.For:
    """Parse a template that is a loop."""
    (loop,) = ENVIRONMENT.parse(source.replace("\n", "")).find_all(nodes.For)
    return loop


def test_a_search_ends_when_its_flag_is_cleared() -> None:
    """A loop without effects once its flag is cleared exits at that point."""
    loop = with_early_exit(search(SEARCH))
    assert isinstance(loop.iter, nodes.Call)
    flags = Namespace(searching=True)
    seen = []
    for item in while_set(range(5), flags, "searching"):
        seen.append(item)
        if item == 2:
            flags["searching"] = False
    assert seen == [0, 1, 2]
    assert list(while_set([1, 2], {"searching": False}, "searching")) == [1, 2]
    assert list(while_set([1, 2], Namespace(), "searching")) == [1, 2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{%- endfor", "x{%- endfor"),
        ("{%- endif", "{%- else %}x{%- endif"),
        ("{%- endif", "{%- elif x %}x{%- endif"),
        ("ns.searching and", "ns.searching or"),
        ("ns.searching and", "not ns.searching and"),
        ("ns.searching and", "m.role and ns.searching and"),
        ("ns.searching and", "ns['searching'] and"),
        ("ns.searching and", "m.searching and"),
        ("place =", "ns ="),
        ("place =", "ns.place ="),
        ("loop.index0", "m.at"),
        ("loop.index0", "loop.revindex0"),
        ("| length", "| first"),
        ("messages[::-1]", "messages[::-1] if m"),
        ("messages[::-1]", "messages[::-1] recursive"),
        ("{%- endfor", "{%- else %}x{%- endfor"),
    ],
)
def test_other_loops_run_to_their_end(old: str, new: str) -> None:
    """A loop with effects that do not depend on the flag, or with a use of its length, runs to its end."""
    loop = search(SEARCH.replace(old, new))
    assert new in SEARCH.replace(old, new)
    assert with_early_exit(loop) is loop


LOOKING = (ROOT / "benchmarks/reasoning_template.jinja").read_text(encoding="utf-8")
TEMPLATES = {
    "looking": LOOKING,
    "searching": "{% set ns = namespace(searching=true, at=-1) %}"
    + SEARCH
    + "{{ ns.at }}{% for m in messages %}{{ loop.index0 - ns.at }}{{ m.content }}{% endfor %}",
}
messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.sampled_from(["a", "<b", "x</think>y"]),
    ),
    max_size=8,
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_rewritten_templates_render_the_same(name: str) -> None:
    """A template with a rewritten loop renders the same text as the original."""
    template, plain = ChatTemplate(TEMPLATES[name], {}), ENVIRONMENT.from_string(TEMPLATES[name])

    @settings(deadline=None)
    @given(messages)
    def show_the_same(talk: list[dict[str, str]]) -> None:
        expected = plain.render(messages=talk, tools=None, documents=None, add_generation_prompt=True)
        assert template.render(talk) == expected

    show_the_same()


def test_clients_cannot_replace_the_loops_function() -> None:
    """A client's template variables cannot replace the function of rewritten loops."""
    template = ChatTemplate(TEMPLATES["searching"], {})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render(talk, template_kwargs={"kvroute_while": "x"}) == template.render(talk)
