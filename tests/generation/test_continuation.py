"""Test the text of a continuation: whole characters, stop sequences, and when it ends."""

from __future__ import annotations

import random

import pytest

from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.text import UNFINISHED, Continuation

BYTES = build_tokenizer("ByteLevelTokenizer")
CHARS = build_tokenizer("CharLevelTokenizer")
TEXT = "naïve 🙂 ¿ qué ? 漢字 \ufffd end"


def pieces(tokenizer, prompt, ids, stops=(), end="length"):
    """Return the emitted texts (one per token, and one at the end) and the continuation."""
    emitted, found = [], []
    row = Continuation(tokenizer, prompt, stops, emitted.append)
    for token in ids:
        row.add(token)
        found.append("".join(emitted))
        emitted.clear()
    row.finish(end)
    found.append("".join(emitted))
    assert row.text == "".join(found)
    return found, row


def test_tokens_that_the_text_leaves_out_neither_show_nor_end_it():
    row = Continuation(BYTES, [], ["cd"], skipped={7, BYTES.eod})
    for token in [*b"ab\x07c", 7]:
        row.add(token)
    assert row.text == "ab" and row.end == ""
    row.add(ord("e"))
    row.add(BYTES.eod)
    assert row.text == "abce" and (row.end, row.tokens) == ("document", 7)
    row = Continuation(BYTES, [], ["\x07"], skipped={7})
    for token in (*b"ab", 7):
        row.add(token)
    assert row.text == "ab" and row.end == "stop"  # such as the end of a chat's turn


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return build_tokenizer("GPT2BPETokenizer", *gpt2_files)


@pytest.mark.parametrize("kind", ["ByteLevelTokenizer", "CharLevelTokenizer", "GPT2BPETokenizer"])
def test_a_character_appears_when_its_last_byte_is_there(kind, gpt2):
    tokenizer = gpt2 if kind == "GPT2BPETokenizer" else build_tokenizer(kind)
    prompt, ids = tokenizer.encode("Ein Wört "), tokenizer.encode(TEXT)
    found, row = pieces(tokenizer, prompt.tolist(), ids.tolist())
    assert row.text == TEXT and row.tokens == len(ids)
    assert sum(piece.count(UNFINISHED) for piece in found) == 1
    ascii_only, _ = pieces(tokenizer, [], tokenizer.encode("one two").tolist())
    assert all(ascii_only[:-1]) and not ascii_only[-1]  # nothing waits without need


@pytest.mark.parametrize("tokenizer", [BYTES, CHARS], ids=["bytes", "characters"])
def test_any_bytes_give_the_text_of_all_tokens_together(tokenizer):
    rng = random.Random(5)
    common = [*b"ab", *"é🙂\ufffd".encode(), 0x80, 0xF0, 0xE2, 0xFF]
    for _ in range(300):
        ids = [rng.choice(common) for _ in range(rng.randrange(30))]
        prompt = list("é🙂 ab".encode())[-rng.randrange(1, 9) :]
        _, row = pieces(tokenizer, [*"🙂".encode(), *prompt], ids)
        whole = tokenizer.decode([*"🙂".encode(), *prompt, *ids])
        assert row.text == whole[len(tokenizer.decode([*"🙂".encode(), *prompt])) :], (prompt, ids)


@pytest.mark.parametrize("ids", [list(b"ab"), [*"é".encode()], [*"\ufffd!".encode()], [0xF0, 98]])
def test_a_prompt_that_ends_in_the_replacement_character_is_not_repeated(ids):
    _, row = pieces(BYTES, [*"a\ufffd".encode()], ids)
    assert row.text == BYTES.decode(ids)


def test_ids_outside_the_vocabulary_are_marked():
    _, row = pieces(BYTES, list(b"a"), [98, 300, 99, 300])
    assert row.text == "b\ufffdc\ufffd"


@pytest.mark.parametrize(
    "stops, text, end",
    [
        (["STOP"], "a STO b ", "stop"),
        (["b STOP", "zz"], "a STO ", "stop"),
        (["STO", "STOP"], "a ", "stop"),
        (["TOP"], "a STO b S", "stop"),
        (["absent", "c d"], "a STO b STOP c", "length"),  # c waits, and is passed on at the end
        ([], "a STO b STOP c", "length"),
    ],
)
def test_stop_sequences_over_the_borders_of_tokens(gpt2, stops, text, end):
    for tokenizer in (BYTES, gpt2):
        ids = tokenizer.encode("a STO b STOP c").tolist()
        _, row = pieces(tokenizer, tokenizer.encode("x").tolist(), ids, stops)
        assert (row.text, row.end) == (text, end)


def test_only_what_may_begin_a_stop_sequence_waits():
    found, row = pieces(BYTES, list(b"#"), list(b"ab\nc\n\nd"), ["\n\n"])
    assert found == ["a", "b", "", "\nc", "", "", "", ""] and (row.end, row.tokens) == ("stop", 6)


def test_a_stop_sequence_in_the_prompt_does_not_count():
    _, row = pieces(BYTES, list(b"ST"), list(b"OP"), ["STOP"])
    assert (row.text, row.end) == ("OP", "length")


def test_the_end_of_document_token_ends_the_text_and_is_no_part_of_it():
    found, row = pieces(BYTES, list(b"a"), [98, 0xF0, BYTES.eod, 99])
    assert found == ["b", "", UNFINISHED, "", ""]
    assert (row.text, row.end, row.tokens) == ("b" + UNFINISHED, "document", 3)


def test_the_end_of_a_turn_ends_the_text_of_a_chat_model(gpt2, tmp_path):
    """As in SmolLM2-Instruct, documents end with <|endoftext|>, and turns with another token."""
    backend = type(gpt2.reference).from_str(gpt2.reference.to_str())
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    turn = backend.token_to_id("<|im_end|>")
    backend.save(str(tmp_path / "tokenizer.json"))
    plain = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    chat = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert chat.eod == plain.eod != turn and chat.fingerprint() == plain.fingerprint()
    assert (plain.ends, chat.ends) == ({plain.eod}, {plain.eod, turn})
    ids = chat.encode(" 42").tolist()
    for tokenizer, text, end in ((chat, " 42", "document"), (plain, " 42<|im_end|> 42", "length")):
        _, row = pieces(tokenizer, chat.encode("6 x 7 =").tolist(), [*ids, turn, *ids])
        assert (row.text, row.end) == (text, end)


def test_held_text_that_completes_a_stop_sequence_at_the_end():
    _, row = pieces(BYTES, list(b"a"), [98, 0xF0], [UNFINISHED])
    assert (row.text, row.end) == ("b", "stop")
