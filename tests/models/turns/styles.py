"""Chat templates in the styles of several families, each with a tokenizer of bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from async_opd.models.chat_template import ChatTemplate
from async_opd.models.tokenizer import Text

HERMES_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>"
)
CODER_CALL = """\
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""
GLM_CALL = """\
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>"""
DEEP_CALL = (
    "<call_begin>function<sep>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```<call_end>"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}
ROLES = "<|im_start|>{{ m.role }}\n"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"


def chatml(
    call: str, keep: str = "", between: str = "\n", around: tuple[str, str] = ("", "")
) -> str:
    """Turns between ``<|im_start|>`` and ``<|im_end|>``; ``keep``: when thoughts are shown."""
    thought = f"{{% if m.reasoning_content and {keep} %}}{THOUGHT}{{% endif %}}" if keep else ""
    calls = f"{{% for c in m.tool_calls %}}{{% if not loop.first %}}{between}{{% endif %}}{call}"
    calls = f"{{% if m.tool_calls %}}{around[0]}{calls}{{% endfor %}}{around[1]}{{% endif %}}"
    body = f"{thought}{{{{ m.content }}}}{calls}"
    turns = f"{{% for m in messages %}}{ROLES}{body}<|im_end|>\n{{% endfor %}}"
    begun = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return LAST_USER * bool(keep) + TOOLS + turns + begun


LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' and loop.first and tools %}"
    "<|start_header_id|>user<|end_header_id|>\n\nTools: {{ tools | tojson }}\n\n{{ m.content }}"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('an id') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ m.content | tojson }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GLM = (
    LAST_USER + "[gMASK]{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}" + GLM_CALL + "{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """A template with the tokens that end its responses; ``special`` are further ones."""

    template: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()

    def text(self, folder: Path, **chat: object) -> Text:
        """Its tokenizer and template in a folder."""
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # as Qwen's and Llama 3's
            [
                pre_tokenizers.Split(
                    Regex(r" ?\p{L}+|\p{N}|\s*[\r\n]+|\s+|[^\s\p{L}\p{N}]+"), "isolated"
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<s>", "<unk>", "<|endoftext|>", *self.ends, *self.special]
        trainer = trainers.BpeTrainer(
            vocab_size=300 + len(special),
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the answer is 42, add add name arguments\n\n"] * 4, trainer)
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        ends = [tokenizer.token_to_id(one) for one in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        named = {"eos_token": self.ends[0], "bos_token": "<s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "chat_template.jinja").write_text(self.template.replace("\n", "{{ '\\n' }}"))
        return Text(folder, chat=ChatTemplate(folder, **chat))  # type: ignore[arg-type]


IM = ("<|im_start|>",)
STYLES = {
    "qwen2.5": Style(chatml(HERMES_CALL), ("<|im_end|>",), IM),
    "qwen3": Style(chatml(HERMES_CALL, "loop.index0 > ns.last"), ("<|im_end|>",), IM),
    "keeps thoughts": Style(chatml(HERMES_CALL, "true"), ("<|im_end|>",), IM),
    "coder": Style(chatml(CODER_CALL), ("<|im_end|>",), IM),
    "deepseek": Style(
        chatml(DEEP_CALL, around=("<calls_begin>", "<calls_end>")), ("<|im_end|>",), IM
    ),
    "llama": Style(LLAMA, ("<|eot_id|>",), ("<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Style(MISTRAL, ("</s>",), ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")),
    "glm": Style(
        GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), ("[gMASK]", "<|assistant|>")
    ),
    "gemma": Style(GEMMA, ("<end_of_turn>",), ("<start_of_turn>",)),
}
