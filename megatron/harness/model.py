"""Answer the requests of lm-evaluation-harness with the model of a run folder.

The log-likelihood of a text with the tokens t_1, t_2, ... after a context c is

    sum over i of log p(t_i | c, t_1 ... t_{i-1})   [nats]

An empty context is replaced by the token that begins a document (BOS). If the tokenizer has no such
token, an empty context is replaced by the end-of-document token. As in the training loss, the
softmax includes the ids that pad the vocabulary.

Legend: B texts, T positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.data.errors import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.errors import DivergedError
from megatron.generation.loop import Speed, continue_texts
from megatron.generation.sampling import Sampling
from megatron.generation.text import Continuation
from megatron.model import GPT
from megatron.parallel.groups import TensorGroup
from megatron.parallel.rng import named_generator

MAX_GEN_TOKS = 256
"""The harness's default for `max_gen_toks`, the largest number of new tokens of a text."""
_GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class RunModel(TemplateLM):
    """A model that lm-evaluation-harness can score. All ranks must get the same requests.

    Args:
        tp: The tensor-parallel group. It contains all ranks of the job.
        max_length: The maximum number of tokens in the input of the model. If a context is too
            long, its first tokens are cut off.
        batch_size: The number of texts in a forward pass.
        info: Facts about the model that are stored with the results.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, tp: TensorGroup, *,
        max_length: int, batch_size: int, seed: int, info: dict[str, Any],
    ):  # fmt: skip
        super().__init__()
        self._model, self._tokenizer, self._tp = model, tokenizer, tp
        self._max_length, self._batch_size, self._seed = max_length, batch_size, seed
        self._info = info
        # Special tokens have no bytes. The harness's own models leave them out of their answers.
        ids = torch.arange(tokenizer.vocab_size)[:, None].numpy()
        self._special = set(ids[tokenizer.token_bytes(ids) == 0].tolist())
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-document token."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that comes before a text without context."""
        # This is the token that begins a document, such as BOS. If there is none, it is the
        # end-of-document token.
        return ([self.eot_token_id, *self._tokenizer.begin])[-1]

    def get_model_info(self) -> dict[str, Any]:
        """Return facts about the model, which the harness stores with the results."""
        return self._info

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text. Tokens that begin a document, such as BOS, come first.

        Args:
            add_special_tokens: If it is False, only the tokens of the text itself are returned.
        """
        if add_special_tokens is False:
            return self._tokenizer.encode(string).tolist()
        return self._tokenizer.encode_prompt(string)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text.

        A text of more than `self.max_length` tokens is cut into windows of this length.
        """
        # The token `prefix_token_id` comes before a text. Only the last window overlaps the
        # previous one.
        owners, pairs = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._max_length, 1)
            for window in windows:
                owners.append(number)
                pairs.append(make_disjoint_window(window))
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._score(pairs, greedy=False), strict=True):
            totals[owner] += total
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context or [self.prefix_token_id], target) for _, context, target in requests]
        return self._score(pairs, greedy=True)

    @torch.inference_mode()
    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, greedy: bool
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is_greedy) for each pair of token ids (context, target).

        `is_greedy` is true if every token of the target is the most likely token at its position.

        Args:
            greedy: Whether to compute `is_greedy`.

        Raises:
            DataError: A target is too long for the model.
            DivergedError: A log-likelihood is infinite or not a number.
        """
        # If `greedy` is false, `is_greedy` has no meaning, and less memory is needed. A target may
        # have `max_length` tokens.
        longest = max((len(target) for _, target in pairs), default=0)
        if longest > self._max_length:
            raise DataError(
                f"the task scores a text of {longest} tokens, but --max_length is "
                f"{self._max_length}; give at least {longest}"
            )
        answers = [(0.0, True)] * len(pairs)
        for batch in self._batches([len(context) + len(target) for context, target in pairs]):
            rows = [sum(pairs[n], [])[-self._max_length - 1 :] for n in batch]
            counts = [len(pairs[n][1]) for n in batch]
            width = max(2, *map(len, rows))  # an empty text needs no logits, but a model some input
            padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            inputs_BT, targets_BT = padded[:, :-1].to(self.device), padded[:, 1:].to(self.device)
            ends = [len(row) - 1 for row in rows]
            first = min(end - count for end, count in zip(ends, counts, strict=True))
            if greedy:
                scores_BTV = self._model(inputs_BT, first=first)
            else:
                losses_BT = self._model(inputs_BT, targets_BT)[:, first:]
            for row, (n, end, count) in enumerate(zip(batch, ends, counts, strict=True)):
                part = slice(end - count - first, end - first)
                if greedy:
                    target_T = targets_BT[row, end - count : end]
                    logs_TV = scores_BTV[row, part].double().log_softmax(-1)
                    likely = bool((logs_TV.argmax(-1) == target_T).all())
                    total = logs_TV.gather(1, target_T[:, None]).sum()
                else:
                    likely, total = True, -losses_BT[row, part].double().sum()
                if not total.isfinite():
                    text = "log-likelihoods are not finite; -o precision=fp32 may help"
                    raise DivergedError(f"the model's {text}")
                answers[n] = (total.item(), likely)
        return answers

    @torch.inference_mode()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to a stop sequence or the end of a document.

        Raises:
            DataError: The task sets a generation option that this project does not support.
        """
        asked: list[Any] = [request.args for request in requests]
        answers = [""] * len(asked)
        by_options: dict[str, list[int]] = {}
        for number, (_, given) in enumerate(asked):
            by_options.setdefault(repr(given), []).append(number)
        for numbers in by_options.values():
            options, how, room = generation_of(asked[numbers[0]][1], self._max_length)
            prompts = [self._prompt(asked[n][0])[-room:] for n in numbers]
            stops = [stop for stop in options["until"] if stop]
            for batch in self._batches([len(prompt) for prompt in prompts]):
                rows, skipped = [prompts[n] for n in batch], self._special
                texts = [Continuation(self._tokenizer, x, stops, skipped=skipped) for x in rows]
                continue_texts(
                    self._model, rows, texts,
                    [named_generator(self._seed, f"request {numbers[n]}") for n in batch],
                    how=how, max_new_tokens=options["max_gen_toks"], tp=self._tp, speed=Speed(),
                    banned=range(self._tokenizer.vocab_size, self._model.shape.vocab_size),
                )  # fmt: skip
                for n, text in zip(batch, texts, strict=True):
                    answers[numbers[n]] = text.text
        return answers

    def _prompt(self, text: str) -> list[int]:
        """Return the token ids of `text`. If there are none, return the end-of-document token."""
        return self._model.last_document(self.tok_encode(text)) or [self.eot_token_id]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Divide texts into batches, the longest texts first, and yield the indices of each batch.

        Args:
            lengths: The length of each text.
        """
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        for begin in range(0, len(order), self._batch_size):
            yield order[begin : begin + self._batch_size]


def generation_of(asked: dict[str, Any], max_length: int) -> tuple[dict[str, Any], Sampling, int]:
    """Return a task's generation options, and the settings for choosing tokens that they mean.

    The last part of the result is the largest number of tokens of a context.

    Args:
        asked: The task's `generation_kwargs`.
        max_length: The maximum number of tokens in the input of the model.

    Raises:
        DataError: This project does not support an option, or it leaves no room for a context.
    """
    try:
        options = dict[str, Any](normalize_gen_kwargs(asked, MAX_GEN_TOKS))
        temperature = float(options.get("temperature", 1.0)) if options["do_sample"] else 0.0
        kept = int(options.get("top_k") or 0) or None, float(options.get("top_p") or 1.0)
    except (TypeError, ValueError) as error:
        raise DataError(f"generation_kwargs: {asked}: not a number ({error})") from error
    one_beam = {"num_beams"} if options.get("num_beams") == 1 else set[str]()  # no beam search
    if unknown := sorted(options.keys() - _GENERATION - one_beam):
        raise DataError(
            f"generation_kwargs: {', '.join(unknown)} cannot be used here; write only "
            f"{', '.join(sorted(_GENERATION))}"
        )
    if (room := max_length - options["max_gen_toks"]) < 1:
        raise DataError(
            f"max_gen_toks {options['max_gen_toks']} leaves no room for a context within "
            f"--max_length {max_length}"
        )
    return options, Sampling(temperature, *kept), room
