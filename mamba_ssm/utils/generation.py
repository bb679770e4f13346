"""Generation with a recurrent state or key/value cache: sampling, the decoding loop, and decoding in a CUDA graph.

Letters: B batch, L prompt length, T length of the result, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

Tensor = torch.Tensor


@dataclass
class InferenceParams:
    """What layers share while a sequence is generated: how far it is, and each layer's state by layer index."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0                                   # rows consumed so far; 0: the next pass starts sequences
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None                 # (B) rows consumed, for layers that read it on the device

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin anew; the layers' tensors are kept, and overwritten by the next pass."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()

    def advance(self, rows: int, cu_seqlens: Tensor | None = None) -> None:
        """Count a pass over `rows` rows of each sequence. cu_seqlens (S+1): the pass was over S packed sequences, each
        of which keeps a length of its own from then on."""
        self.seqlen_offset += rows
        if cu_seqlens is not None:
            self.lengths_per_sample = cu_seqlens.diff()
        elif self.lengths_per_sample is not None:
            self.lengths_per_sample += rows


class Streamer(Protocol):
    """What is told of each token as it comes."""

    def put(self, tokens: Tensor) -> None:
        """The next tokens, on the CPU: the prompt (B, L) at first, then (B)."""

    def end(self) -> None:
        """No more will come."""


@dataclass(frozen=True)
class GenerationOutput:
    """sequences (B, T) with the prompt; scores, if asked for: each step's logits (B, V) before any filter."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the top_k largest logits (..., V) to -inf, in place; ties with the last of them stay."""
    smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    logits.masked_fill_(logits < smallest, -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Keep the fewest likeliest tokens that reach probability top_p in logits (..., V), in place; 0 and 1: all."""
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ordered, indices = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(dim=-1)
    beyond = probability.cumsum(dim=-1) - probability >= top_p                            # reached before this token
    logits.masked_fill_(beyond.scatter(-1, indices, beyond), -torch.inf)


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Set tokens less likely than min_p times the likeliest to -inf in logits (..., V), in place; 0: none."""
    if min_p <= 0.0:
        return
    log_probability = logits.log_softmax(dim=-1)
    least = log_probability.amax(dim=-1, keepdim=True) + math.log(min_p)
    logits.masked_fill_(log_probability < least, -torch.inf)


def modify_logit_for_repetition_penalty(logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float) -> None:
    """Make the tokens prev_output_tokens (B, n) less likely in logits (B, V), in place: positive logits are divided by
    the penalty, negative ones multiplied."""
    if repetition_penalty == 1.0:
        return
    seen = logits.gather(1, prev_output_tokens)
    seen = torch.where(seen < 0, seen * repetition_penalty, seen / repetition_penalty)
    logits.scatter_(1, prev_output_tokens, seen)


def sample(
    logits: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row of logits (B, V) -> (B).

    top_k 1 takes the likeliest; else logits are divided by the temperature, and what top_k (0: all), top_p (0: all) and
    min_p leave is drawn from."""
    _check_sampling(top_k, top_p, min_p, temperature)
    if top_k == 1:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k > 0:
        modify_logits_for_top_k_filtering(logits, top_k)
    modify_logits_for_top_p_filtering(logits, top_p)
    modify_logits_for_min_p_filtering(logits, min_p)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: nn.Module,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    output_scores: bool = False,
    streamer: Streamer | None = None,
    generator: torch.Generator | None = None,
) -> GenerationOutput:
    """Continue the prompts input_ids (B, L) to max_length tokens, or until every row has met eos_token_id, which then
    fills the rest of the row.

    teacher_outputs (B, n): the first n tokens are these, whatever the model says; vocab_size: tokens from there on are
    padding and never chosen; cg: each step in a CUDA graph (plain calls on a CPU), kept by the model for the next call;
    output_scores keeps each step's logits; the rest as in `sample`."""
    _check_sampling(top_k, top_p, min_p, temperature)
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"decode: input_ids has shape {tuple(input_ids.shape)}, expected (B, L) with L >= 1")
    if repetition_penalty <= 0.0:
        raise ValueError(f"decode: repetition_penalty is {repetition_penalty}, expected more than 0")
    next_logits = _decoder(model, input_ids, max_length, cg)
    sequences, scores, tokens = [input_ids], [], input_ids
    finished = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for length in range(input_ids.shape[1], max_length):
        logits = next_logits(tokens)[..., :vocab_size]                                    # (B, V)
        if output_scores:
            scores.append(logits.clone())
        if teacher_outputs is not None and length < teacher_outputs.shape[1]:
            chosen = teacher_outputs[:, length]
        else:
            modify_logit_for_repetition_penalty(logits, torch.cat(sequences, dim=1), repetition_penalty)
            chosen = sample(logits, top_k, top_p, min_p, temperature, generator)
        if eos_token_id is not None:
            chosen = chosen.masked_fill(finished, eos_token_id)
            finished = finished | (chosen == eos_token_id)
        tokens = chosen.unsqueeze(1)
        sequences.append(tokens)
        if streamer is not None:
            streamer.put(chosen.cpu())
        if eos_token_id is not None and finished.all():
            break
    if streamer is not None:
        streamer.end()
    return GenerationOutput(torch.cat(sequences, dim=1), tuple(scores) if output_scores else None)


def _decoder(model: nn.Module, input_ids: Tensor, max_length: int, cg: bool) -> Callable[[Tensor], Tensor]:
    """A function that consumes tokens (B, n) and returns the logits after the last of them (B, V)."""
    batch, graph = input_ids.shape[0], None
    if cg:
        previous = getattr(model, "_decoding_cache", None)
        graph = model._decoding_cache = update_graph_cache(model, previous, batch, input_ids.shape[1], max_length)
        params = graph.inference_params
        params.reset(graph.max_seqlen, graph.max_batch_size)
    else:
        params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)

    def next_logits(tokens: Tensor) -> Tensor:
        offset = params.seqlen_offset
        if graph is not None and offset > 0:
            logits = graph.run(tokens, torch.full_like(tokens, offset), offset)
        else:
            logits = model(tokens, inference_params=params, num_last_tokens=1).logits
        params.seqlen_offset = offset + tokens.shape[1]
        return logits[:, -1].clone()

    return next_logits


class GenerationMixin:
    """`generate` for a model with `forward(input_ids, position_ids, inference_params, num_last_tokens).logits` and
    `allocate_inference_cache(batch_size, max_seqlen, dtype)`."""

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> GenerationOutput | Tensor:
        """`decode` with this model: sequences (B, T), or a `GenerationOutput` with return_dict_in_generate; kwargs are
        `decode`'s other arguments."""
        output = decode(
            input_ids, self, max_length, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature,
            output_scores=output_scores, **kwargs,
        )  # fmt: skip
        return output if return_dict_in_generate else output.sequences


@dataclass
class DecodingCGCache:
    """Captured decoding steps of one model, their shared state, and `run` to take one."""

    max_batch_size: int
    max_seqlen: int
    inference_params: InferenceParams
    captured_from: tuple                                     # where and what the parameters were
    callables: dict[tuple[int, int], Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)    # by (B, n)
    mempool: Any = None

    def run(self, input_ids: Tensor, position_ids: Tensor, seqlen: int) -> Tensor:
        """Consume input_ids (B, n) behind the first `seqlen` tokens: logits (B, n, V)."""
        self.inference_params.seqlen_offset = seqlen
        self.inference_params.lengths_per_sample[: input_ids.shape[0]] = seqlen
        return self.callables[tuple(input_ids.shape)](input_ids, position_ids)


@torch.no_grad()
def update_graph_cache(
    model: nn.Module,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Sequence[int] = (1,),
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """A cache whose `run` decodes decoding_seqlens tokens at a time for batch_size rows of up to max_seqlen.

    On a GPU each pair of sizes is captured in a CUDA graph once; on a CPU `run` calls the model. A cache that is large
    enough is used on while the model's parameters stay where they are. seqlen_og is the prompt's length (at least 1);
    capturing overwrites the states, so that prompts come after it."""
    parameter = next(iter(model.parameters()))
    captured_from = (parameter.device, parameter.data_ptr(), parameter.dtype if dtype is None else dtype)
    large_enough = cache is not None and cache.max_batch_size >= batch_size and cache.max_seqlen >= max_seqlen
    if not large_enough or cache.captured_from != captured_from:
        lengths = torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=parameter.device)
        memory = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
        params = InferenceParams(max_seqlen, batch_size, seqlen_og, 0, memory, lengths)
        cache = DecodingCGCache(batch_size, max_seqlen, params, captured_from)
    for decoding_seqlen in decoding_seqlens:
        sizes = (batch_size, decoding_seqlen)
        if sizes not in cache.callables:
            step = _plain_step(model, cache, decoding_seqlen)
            cache.callables[sizes] = _captured(step, cache, sizes, n_warmups) if parameter.is_cuda else step
    return cache


def _plain_step(model: nn.Module, cache: DecodingCGCache, decoding_seqlen: int) -> Callable:
    def run(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        params = cache.inference_params
        return model(input_ids, position_ids, inference_params=params, num_last_tokens=decoding_seqlen).logits

    return run


def _captured(step: Callable, cache: DecodingCGCache, sizes: tuple[int, int], n_warmups: int) -> Callable:
    params = cache.inference_params
    params.seqlen_offset = max(cache.max_seqlen - sizes[1], 1)                            # a step, not a prompt
    params.lengths_per_sample.fill_(cache.max_seqlen - sizes[1])
    input_ids = torch.zeros(sizes, dtype=torch.long, device=params.lengths_per_sample.device)
    position_ids = torch.zeros_like(input_ids)
    stream = torch.cuda.Stream(input_ids.device)
    stream.wait_stream(torch.cuda.current_stream(input_ids.device))
    with torch.cuda.stream(stream):
        for _ in range(n_warmups):
            step(input_ids, position_ids)
    torch.cuda.current_stream(input_ids.device).wait_stream(stream)
    cache.mempool = torch.cuda.graph_pool_handle() if cache.mempool is None else cache.mempool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=cache.mempool):
        logits = step(input_ids, position_ids)

    def replay(new_input_ids: Tensor, new_position_ids: Tensor) -> Tensor:
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        return logits.clone()

    return replay


def _check_sampling(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    if top_k < 0:
        raise ValueError(f"sample: top_k is {top_k}, expected 0 (all tokens) or more")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"sample: {name} is {value}, expected 0..1")
    if not temperature > 0.0:
        raise ValueError(f"sample: temperature is {temperature}, expected more than 0; top_k=1 is greedy")
