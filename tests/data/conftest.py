import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = 400


def word_tokenizer(*, bos=False):
    """Word `w<n>` is token n + 3; 0 is BOS, 1 EOS, 2 unknown."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n + 3 for n in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=8,
    )


@pytest.fixture
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def bos_tokenizer():
    return word_tokenizer(bos=True)


@pytest.fixture
def words():
    """Text of words from `start` up to `end`."""
    return lambda start, end: " ".join(f"w{n}" for n in range(start, end))
