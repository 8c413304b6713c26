"""Build the `tiny` policy: tokenizer, chat template, and a small Llama cloned from the scripted agent of `desk`.

    python scripts/build_tiny_policy.py                    # rewrites draco/policy/tiny in some minutes on one core
    python scripts/build_tiny_policy.py out=/tmp/tiny clean=200 broad=100 faulty=100

To measure a built policy, train one step from it and evaluate the run's base model:

    draco train run=/tmp/run policy.path=/tmp/tiny steps=1
    draco evaluate run=/tmp/run checkpoints=base split=test_challenge

The model learns in four phases. A drill teaches copying. Clean demonstrations of the families follow, then clean ones
of any mix of sub-goals, then faulty ones with a fixed rate for each fault. In the last phase some turns are garbled and
then repeated. The garbled turn itself is not learned, only how to continue after it: a clone that never saw a garbled
turn does not recover from one. Every mistake is a choice at one token that later training can unlearn. Demonstrations
draw names and numbers from all pools, with fresh seeds; they are never the tasks of a split. The result is the same to
the bit on one machine at one thread.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draco.env.base import CODE, TOOL_CALL
from draco.env.desk.agent import Agent
from draco.env.desk.apps import APIS, APPS, NUMBERS
from draco.env.desk.environment import RULES, DeskEpisode
from draco.env.desk.scenarios import EVERY, SPLITS, Family, GoldTask, compose, pools

END = "<|end|>"
#: single-token turn marks; a message is rendered on its own, so a longer conversation only appends
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: chance of each fault at each opportunity, the same throughout the second phase
RATES = {
    "skips_pages": 0.14,
    "restates_secret": 0.22,
    "wrong_recipient": 0.18,
    "wrong_amount": 0.13,
    "duplicates": 0.035,
    "forgets_confirmation": 0.08,
    "stops_early": 0.03,
}
#: chance of a garbled turn before a turn of the scripted agent
SLIPS = 0.04
#: sub-goals about a list that the whole office shares
ONCE = frozenset({"approve", "clean", "purge"})
CODE_KINDS = ("pay", "bill", "approve", "clean", "note", "book", "share", "purge", "vault")
ANY = Family("any", (CODE_KINDS, CODE_KINDS, CODE_KINDS))
#: A name or a two-digit number is one token: to copy it in pieces takes a second look-up, which is learned far slower.
WORDS = (*pools(EVERY)[0], *(str(n) for n in range(10, 100)))
#: The fixed parts of prompts and observations, separated by bars, because spaces at their ends count.
SENTENCES = """. |: |task: |pay |pay the bill |approve all requests by |delete all mails from |delete all files of \
|note the code in the new mail from |book | at the free time.|share the final file | with |open the file \
| with its key and mail | opened.|unlock the account | unlocked.|refund all late orders of |apps:"""
OBSERVED = """ of | by | from |; |; next page |; end|held |paid|cancelled|approved|sent|deleted|added|booked|shared\
|opened|unlocked|refunded|completed|none|empty|error: | old| new| busy| free| draft| final| late| fine|code | was \
|was | code |to | due | paid |key |done|fail"""
ERRORS = """write one call apis.app.name(key=value)|write one JSON call|literals only|too long|no such api\
|bad arguments|no such id|no such page|wrong key|no such status|already completed"""


@dataclass
class Options:
    """What `name=value` on the command line sets."""

    out: str = "draco/policy/tiny"
    seed: int = 0
    drill: int = 220  #: updates on repeated names and numbers, where copying is learned
    clean: int = 400  #: updates on clean tasks of the families
    broad: int = 250  #: updates on clean tasks of any mix of sub-goals
    faulty: int = 500  #: updates on tasks with faults
    batch: int = 32  #: episodes an update
    lr: float = 3e-3  #: peak
    threads: int = 1
    start: str = ""  #: a policy built with broad=0 faulty=0, to continue from: the same result in less time


#: letters that ids begin with, for the parameters that take one letter only
LETTERS = {
    "pay.confirm": "p",
    "pay.cancel": "p",
    "pay.approve": "r",
    "mail.read": "m",
    "mail.delete": "m",
    "calendar.confirm": "b",
    "calendar.cancel": "b",
    "files.share": "f",
    "files.delete": "f",
    "orders.refund": "o",
    "orders.confirm": "h",
    "orders.cancel": "h",
}


def phrases() -> list[str]:
    """Everything that is one token beyond bytes: names, numbers, call frames, words of prompts and answers."""
    frames = ['")</code>', ")</code>", '"}}</tool_call>', "}}</tool_call>", '", slot="t', '", to="k']
    frames.append(f'{CODE.open}apis.pay.send(to="k')
    for api, params in APIS.items():
        quotes = ["" if p in NUMBERS else '"' for p in params]
        first = quotes[0] + LETTERS.get(api, "")
        frames += [
            f"{CODE.open}apis.{api}({params[0]}={first}",
            f'{TOOL_CALL.open}{{"name": "{api}", "arguments": {{"{params[0]}": {first}',
        ]
        for last, param, quote in zip(quotes, params[1:], quotes[1:], strict=False):
            frames += [f"{last}, {param}={quote}", f'{last}, "{param}": {quote}']
    texts = [word for text in (SENTENCES, OBSERVED, ERRORS) for word in text.split("|")]
    texts += [CODE.reminder, TOOL_CALL.reminder]
    return list(dict.fromkeys([*WORDS, *frames, f". {RULES}", *(f" {app}" for app in APPS), *texts]))


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes (so that any text can be encoded), turn marks, and phrases as plain added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    core.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases()])
    # Reserved marks fill the vocabulary up to a multiple of 64: every id of the model is then a token.
    spare = -core.get_vocab_size() % 64
    core.add_special_tokens([AddedToken(f"<|spare{i}|>", special=True, normalized=False) for i in range(spare)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=END,
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def network(tok: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained policy."""
    config = LlamaConfig(
        vocab_size=len(tok),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        # 1/sqrt(width): the usual 0.02 leaves attention flat here for hundreds of updates.
        initializer_range=0.088,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: LlamaForCausalLM, sharpness: float = 6.0, frequencies: int = 4) -> None:
    """Let the heads of the first layer start by attending to the tokens 1, 2, 3 and 4 places back.

    Copying needs heads that see the previous tokens. To find them by gradient would take most of the training.
    One feature of every embedding is constant; queries and keys read only this one, and the query of head h is rotated
    by h places. With rotary positions q_i·k_j = Σ_f a² cos(θ_f (i − j − h)), which is largest at j = i − h.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    embeddings, size = model.model.embed_tokens.weight, attention.head_dim
    embeddings[:, 0] = 0.5
    constant = (embeddings[:, 0] / embeddings.pow(2).mean(-1).sqrt()).mean()  # after the norm
    angles = 10_000.0 ** (-2 * torch.arange(frequencies) / size)
    amplitude = math.sqrt(sharpness * math.sqrt(size)) / constant
    queries, keys = attention.q_proj.weight, attention.k_proj.weight
    queries.zero_()
    keys.zero_()
    for start in range(0, keys.shape[0], size):
        keys[start : start + frequencies, 0] = amplitude
    for head in range(config.num_attention_heads):
        start, middle = head * size, head * size + size // 2
        queries[start : start + frequencies, 0] = amplitude * torch.cos((head + 1) * angles)
        queries[middle : middle + frequencies, 0] = -amplitude * torch.sin((head + 1) * angles)


class Teacher:
    """Endless demonstrations: the token ids of an episode, and which of them the policy says."""

    def __init__(self, tok: PreTrainedTokenizerFast, seed: str) -> None:
        self._tok, self.rng = tok, Random(seed)
        self._families = SPLITS["train"].families
        self._words = [tok.get_vocab()[word] for word in WORDS]

    def episode(self, rates: dict[str, float], slips: float = 0.0) -> Episode:
        """One episode of a random family: half the time as its tasks are, else of 1 to 4 of its sub-goals at random."""
        rng = self.rng
        family, level = rng.choice(self._families), rng.randint(1, 3)
        order = list(family.blocks[level - 1])
        rng.shuffle(order)
        if rng.random() < 0.5:
            # Lists occur once a task.
            drawn = rng.choices(order, k=rng.randint(1, 4))
            order = [kind for i, kind in enumerate(drawn) if kind not in ONCE or kind not in drawn[:i]]
        return self._demonstrate(compose("fresh", EVERY, "fresh", family, tuple(order), level, rng), rates, slips)

    def mixed(self, rates: dict[str, float], slips: float = 0.0) -> Episode:
        """One episode of 1 to 4 sub-goals of any kind that goes with code, or half the time of a family."""
        rng = self.rng
        if rng.random() < 0.5:
            return self.episode(rates, slips)
        drawn = rng.choices(CODE_KINDS, k=rng.randint(1, 4))
        order = tuple(kind for i, kind in enumerate(drawn) if kind not in ONCE or kind not in drawn[:i])
        return self._demonstrate(compose("fresh", EVERY, "fresh", ANY, order, rng.randint(1, 3), rng), rates, slips)

    def drill(self, width: int = 64) -> Episode:
        """A short random string of names and numbers, again and again: all but its first round can be copied."""
        words = self.rng.sample(self._words, self.rng.randint(3, 14))
        before = self.rng.choices(self._words, k=self.rng.randint(0, 8))
        ids = [*before, *words * (width // len(words) + 1)][:width]
        return ids, [i > len(before) + len(words) for i in range(width)]

    def _demonstrate(self, gold: GoldTask, rates: dict[str, float], slips: float = 0.0) -> Episode:
        episode, agent = DeskEpisode(gold), Agent(gold, rates, self.rng)
        ids = opening_ids(self._tok, episode)
        own = [False] * len(ids)
        observed: list[str] = []
        turns: list[str] = []

        def add(said: list[int], answers: Sequence[str], mine: bool) -> None:
            # A code turn is cut at its stop string, so its end mark is glue; a turn of function calls ends itself.
            ends = mine and not episode.format.stop
            glue = glue_ids(self._tok, answers)
            ids.extend([*said, self._tok.eos_token_id, *glue])
            own.extend([*[mine] * len(said), ends, *[False] * len(glue)])

        while not agent.done:
            turn = agent.turn(observed)
            said = self._tok.encode(turn)
            if slips and self.rng.random() < slips:
                text, garbled, answers = self._slip(said, gold, turns)
                add(garbled, answers, mine=False)
                self._answers(text, episode)
                turns.append(text)
            observed = self._answers(turn, episode)
            turns.append(turn)
            add(said, observed, mine=True)
        # Nothing is sampled after the completion call.
        last = max(i for i, mine in enumerate(own) if mine) + 1
        return ids[:last], own[:last]

    def _slip(self, said: list[int], gold: GoldTask, before: Sequence[str]) -> tuple[str, list[int], list[str]]:
        """A garbled turn that changes nothing, its tokens and the answers to it: one token replaced or deleted, or the
        start cut off."""
        for _ in range(4):
            garbled, at = list(said), self.rng.randrange(len(said))
            if self.rng.random() < 0.5:
                garbled[at] = self.rng.choice(self._words)
            elif self.rng.random() < 0.5:
                del garbled[at]
            else:
                garbled = garbled[at + 1 :]
            text = str(self._tok.decode(garbled))
            trial = DeskEpisode(gold)
            for turn in before:
                self._answers(turn, trial)
            answers = self._answers(text, trial)
            if garbled != said and all(a.startswith(("error: ", "none", "No ")) for a in answers):
                return text, garbled, answers
        return "", [], [gold.style.reminder]

    @staticmethod
    def _answers(turn: str, episode: DeskEpisode) -> list[str]:
        """What the episode says to a turn."""
        actions = [a.body for a in episode.format.parse(turn)]
        if not actions:
            episode.idle()
            return [episode.format.reminder]
        return list(episode.step(actions).observations)


def opening_ids(tok: PreTrainedTokenizerFast, episode: DeskEpisode) -> list[int]:
    """The prompt, up to the mark of the first assistant turn."""
    text = "".join(f"<|{m.role}|>{m.content}{END}" for m in episode.opening)
    return list(tok.encode(f"{text}<|assistant|>"))


def glue_ids(tok: PreTrainedTokenizerFast, observations: Sequence[str]) -> list[int]:
    """The message with the observations of a turn, up to the mark of the next assistant turn."""
    return list(tok.encode("<|user|>" + "\n".join(observations) + f"{END}<|assistant|>"))


Episode = tuple[list[int], list[bool]]  #: token ids, and which of them the policy says
Draw = Callable[[], Episode]
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(draw: Draw, rng: Random, count: int, size: int) -> Iterator[Batch]:
    """`count` batches of ids [B, T], padded right, and targets [B, T] (−100 where nothing is learned).

    Four batches are drawn at a time and sorted by length, so that little is padding.
    """
    ready: list[list[Episode]] = []
    for _ in range(count):
        if not ready:
            drawn = sorted((draw() for _ in range(4 * size)), key=lambda row: len(row[0]))
            ready = rng.sample([drawn[i : i + size] for i in range(0, len(drawn), size)], 4)
        rows = ready.pop()
        width = max(len(ids) for ids, _ in rows)
        ids, targets = torch.zeros(size, width, dtype=torch.long), torch.full((size, width), -100)
        for row, (tokens, own) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            targets[row, : len(tokens)] = torch.where(torch.tensor(own), torch.tensor(tokens), -100)
        yield ids, targets


def clone(model: Any, data: Iterable[Batch], total: int, lr: float, name: str, decay: bool = True) -> None:
    """Fit the model to `total` batches, by the loss on the tokens that are the policy's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)

    def rate(update: int) -> float:
        """Warm-up, then a cosine down to 2%."""
        cosine = 0.02 + 0.98 * (1 + math.cos(math.pi * update / total)) / 2
        return min((update + 1) / 30, cosine if decay else 1.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    start = time.perf_counter()
    for update, (ids, targets) in enumerate(data):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        mine = targets[:, 1:] >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[mine]), targets[:, 1:][mine])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 25 == 0 or update == total - 1:
            wall = time.perf_counter() - start
            print(f"{name} {update:5d} loss {loss.item():.4f} {wall:.0f} s", flush=True)


def main(words: Sequence[str]) -> None:
    """Build the policy and write it."""
    opt: Any = OmegaConf.structured(Options)
    try:
        opt.merge_with_dotlist(list(words))
    except OmegaConfBaseException as error:
        raise SystemExit(f"{str(error).splitlines()[0]}; write name=value, with a name of {', '.join(opt)}") from None
    torch.set_num_threads(opt.threads)
    torch.manual_seed(opt.seed)
    tok = tokenizer()
    model: Any = AutoModelForCausalLM.from_pretrained(opt.start) if opt.start else network(tok)
    print(f"{model.num_parameters():,} parameters, {len(tok)} tokens")
    teachers = {name: Teacher(tok, f"{name} {opt.seed}") for name in ("clean", "broad", "faulty")}
    clean, broad, faulty = teachers.values()

    def phase(name: str, teacher: Teacher, draw: Draw, count: int, lr: float, decay: bool = True) -> None:
        clone(model, batches(draw, teacher.rng, count, opt.batch), count, lr, name, decay)

    if not opt.start:
        phase("drill", clean, clean.drill, opt.drill, opt.lr, decay=False)
        phase("clean", clean, lambda: clean.episode({}), opt.clean, opt.lr)
    if opt.broad:
        phase("broad", broad, lambda: broad.mixed({}), opt.broad, opt.lr / 2)
    if opt.faulty:
        phase("faulty", faulty, lambda: faulty.mixed(RATES, SLIPS), opt.faulty, opt.lr / 2)
    tok.save_pretrained(opt.out)
    model.save_pretrained(opt.out)


if __name__ == "__main__":
    main(sys.argv[1:])
