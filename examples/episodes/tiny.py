"""Tiny Qwen3 models that call tools: a tokenizer for each example, and one chat template."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, UNKNOWN = "<pad>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIAL = (PAD, START, END, UNKNOWN)
CHARACTERS = (*map(chr, range(32, 127)), "\n")
ROLES = ("system\n", "user\n", "assistant\n", "tool\n")
MAX_LENGTH = 512
TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}

{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# transformers does not annotate these two.
_new_tokenizer: Callable[..., Any] = PreTrainedTokenizerFast
_new_model: Callable[[Qwen3Config], Qwen3ForCausalLM] = Qwen3ForCausalLM


def make_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of single characters, in which each of these longer texts is one token.

    The texts are those that all dialogues of an example have: the description of its tools, the
    beginning and the end of a call. Sequences stay short by them.
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    core.add_tokens([AddedToken(one, normalized=False) for one in (*ROLES, *words)])
    made = _new_tokenizer(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def make_model(seed: int, vocabulary_size: int) -> Qwen3ForCausalLM:
    """An untrained model of 0.5 M parameters, the same shape for teachers and students."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-vocabulary_size // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(END),
    )
    return _new_model(config)


def save(model: Qwen3ForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the weights, rounded to bfloat16, with the tokenizer and both configurations."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Any]:
    """Saved weights, in float32, and their tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)
