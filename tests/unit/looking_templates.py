"""Chat templates whose loops look around, each in the manner of a family of models; in our own words."""

from __future__ import annotations

from pathlib import Path

ASKED = (Path(__file__).parents[2] / "benchmarks/reasoning_template.jinja").read_text(encoding="utf-8")
"""Looks for the last question from the end, and at a tool's neighbours."""

FRONTED = """\
{{- bos_token }}{% if date_string is not defined %}{% set date_string = '1 May' %}{% endif %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|im_start|>' + date_string + system + '<|im_end|>' }}
{%- if tools %}
{%- if messages | length == 0 %}{{ raise_exception('no question') }}{% endif %}
{%- set question = messages[0].content | trim %}{% set messages = messages[1:] %}
{{- '<|im_start|>with ' }}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{{- question + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '<|im_start|>' + message.tool_calls[0].function.name + '<|im_end|>' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + ' ' + message['content'] | trim + date_string + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}
"""
"""Shows the system's message and, with tools, the first question in front of its loop."""

LATEST = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(at=0) %}
{%- for message in rest %}
{%- if message.role != 'tool' and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('in turns, please') }}{% endif %}
{%- set ns.at = ns.at + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == questions[-1] %}{{ '<|im_start|>' + (tools | tojson) }}{% endif %}
{%- if loop.last and system is defined %}{{ '[' + system + '] ' }}{% endif %}
{{- '<|im_start|>' + message.content + '<|im_end|>' }}
{%- else %}{{ message.content + eos_token + '<|im_end|>' }}{% endif %}
{%- endfor %}
"""
"""Shows tools, and the system's message, with the last question alone."""

STATEFUL = """\
{%- set ns = namespace(called=false, first=true, system='') %}
{%- for message in messages %}{% if message.role == 'system' %}
{%- set ns.system = ns.system + message.content %}{% endif %}
{%- endfor %}{{ bos_token + ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.called = false %}{{ '<|im_start|>Q ' + message.content }}
{%- endif %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if ns.first %}{{ '<|im_start|>begin ' }}{% set ns.first = false %}{% endif %}{{ call.function.name }}
{%- endfor %}{% set ns.called = true %}
{%- elif message.role == 'assistant' %}
{{- ('<|im_end|>after ' if ns.called else '<|im_start|>A ') + message.content + '<|im_end|>' }}
{%- set ns.called = false %}
{%- endif %}
{%- if message.role == 'tool' %}{{ '<|im_start|>R ' + message.content }}{% continue %}{{ 'never' }}
{%- endif %}
{%- endfor %}
{%- if ns.called %}<|im_end|>{% elif add_generation_prompt %}{{ '<|im_start|>A ' }}{% endif %}
"""
"""Keeps in a namespace what it has seen."""

CHANNELS = """\
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}{{ content | tojson }}
{%- endif %}{% endmacro %}
{%- macro system() %}{{ model_identity or 'A model' }}, {{ strftime_now('%Y') }}{% endmacro %}
{{- '<|im_start|>' + system() + '<|im_end|>' }}
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- set call = namespace(name=none) %}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set later = namespace(found=false) %}
{%- for other in messages[loop.index:] %}{% if other.role == 'assistant' and not other.tool_calls %}
{%- set later.found = true %}{% endif %}{% endfor %}
{%- if m.reasoning_content and not later.found %}{{ '<|im_start|>thinks ' + m.reasoning_content }}
{%- endif %}
{%- set call.name = m.tool_calls[0].function.name %}{{ '<|im_start|>calls ' + call.name + '<|im_end|>' }}
{%- elif m.role == 'tool' %}
{%- if call.name is none %}{{ raise_exception('nothing was called') }}{% endif %}
{{- '<|im_start|>' + call.name + ': ' + text(m.content) + '<|im_end|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>says ' + text(m.content) + ('!' if asked.last < loop.index0 else '.') + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + m.role + text(m.content) + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>says{% endif %}
"""
"""Looks ahead for a last answer where there are calls; uses macros."""

PLACES = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ loop.index ~ message.role }}
{%- if message.role == 'system' %}{{ loop.revindex ~ ' of ' ~ loop.length }}{% endif %}
{%- if loop.previtem is defined and loop.previtem.role == message.role %} again{% endif %}
{%- if loop.nextitem is defined and loop.nextitem.role == 'tool' %} and then{% endif %}
{%- if not loop.first and loop.depth == 1 %}, {% endif %}{{ message.content ~ '<|im_end|>' }}
{%- endfor %}{{ messages | length }}
"""
"""Asks for places in the loop."""

PARTS = """\
{%- set ns = namespace(images=0) %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{% set ns.images = ns.images + 1 %}Picture {{ ns.images }}
{%- else %}{{ part.text }}{{ '|' if not loop.last }}{% endif %}
{%- endfor %}
{%- endif %}{{ '<|im_end|>' }}
{%- endfor %}
"""
"""Loops over a message's parts, and counts images."""

LOOKING = {
    "asked": ASKED,
    "fronted": FRONTED,
    "latest": LATEST,
    "stateful": STATEFUL,
    "channels": CHANNELS,
    "places": PLACES,
    "parts": PARTS,
}
