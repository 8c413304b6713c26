"""Build the `tiny` policy: tokenizer, chat template, and a small Llama cloned from the scripted agent of `desk`.

    python scripts/build_tiny_policy.py                    # rewrites draco/policy/tiny in some minutes on one core
    python scripts/build_tiny_policy.py out=/tmp/tiny clean=200 broad=100 faulty=100
    python scripts/build_tiny_policy.py measure=draco/policy/tiny split=test_challenge

A drill teaches copying; clean demonstrations of the families follow, then clean ones of any mix of sub-goals, then
faulty ones with one fixed rate a fault. In the last a turn is now and then garbled and repeated: what was garbled is
not learned, going on after it is (a clone that has seen no slip does not recover from one). Every mistake is a
choice at one token that later training can unlearn, not an inability. Like any language model the clone has seen all
words before: demonstrations draw names and numbers from all pools, with fresh seeds. They never are the tasks of a
split. Deterministic on one machine at one thread.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache

from draco.env.base import CODE, TOOL_CALL
from draco.env.desk.agent import Agent
from draco.env.desk.apps import APIS, APPS, NUMBERS
from draco.env.desk.environment import RULES, DeskEpisode
from draco.env.desk.evaluator import FAULTS, DeskEvaluator
from draco.env.desk.scenarios import EVERY, SPLITS, Family, GoldTask, compose, gold_task, pools, task_ids

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
#: a name or a two-digit number is one token: copying it piece by piece takes a second look-up, learned far slower
WORDS = (*pools(EVERY)[0], *(str(n) for n in range(10, 100)))
#: the fixed parts of prompts and observations, between bars since spaces at their ends count
SENTENCES = """. |: |task: |pay |pay the bill |approve all requests by |delete all mails from |delete all files of \
|note the code in the new mail from |book | at the free time.|share the final file | with |open the file \
| with its key and mail | opened.|unlock the account | unlocked.|refund all late orders of |apps:"""
OBSERVED = """ of | by | from |; |; next page |; end|held |paid|cancelled|approved|sent|deleted|added|booked|shared\
|opened|unlocked|refunded|completed|none|empty|error: | old| new| busy| free| draft| final| late| fine|code | was \
|was | code |to | due | paid |key |done|fail"""
ERRORS = """write one call apis.app.name(key=value)|write one JSON call|literals only|too long|no such api\
|bad arguments|no such id|no such page|wrong key|no such status|already completed"""


@dataclass(slots=True)
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
    start: str = ""  #: a policy built with broad=0 faulty=0, to go on from: the same result in less time
    measure: str = ""  #: a built policy to measure instead of building one
    split: str = "dev"


def options(words: Iterable[str]) -> Options:
    """Parse `name=value` words.

    Raises:
        SystemExit: an unknown name or a value of the wrong type.
    """
    kinds = {f.name: type(getattr(Options(), f.name)) for f in fields(Options)}
    values: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in kinds:
            raise SystemExit(f"unknown option {word!r}; write name=value with one of: {', '.join(kinds)}")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise SystemExit(f"{name} must be of type {kinds[name].__name__}, not {value!r}") from None
    return Options(**values)


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
    """Start the heads of the first layer on the tokens 1, 2, 3 and 4 places back.

    Copying needs a head that knows what stood before; finding one by gradient takes most of the training otherwise.
    One feature of every embedding is constant, queries and keys read it alone, and a query is turned by h places:
    with rotary positions q_i·k_j = Σ_f a² cos(θ_f (i − j − h)), largest at j = i − h.
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
    """Endless demonstrations as (token ids, is it the policy's to say) pairs."""

    def __init__(self, tok: PreTrainedTokenizerFast, seed: str) -> None:
        self._tok, self.rng = tok, Random(seed)
        self._families = SPLITS["train"].families
        self._words = [tok.get_vocab()[word] for word in WORDS]

    def episode(self, rates: dict[str, float], slips: float = 0.0) -> tuple[list[int], list[bool]]:
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

    def mixed(self, rates: dict[str, float], slips: float = 0.0) -> tuple[list[int], list[bool]]:
        """One episode of 1 to 4 sub-goals of any kind that goes with code, or half the time of a family."""
        rng = self.rng
        if rng.random() < 0.5:
            return self.episode(rates, slips)
        drawn = rng.choices(CODE_KINDS, k=rng.randint(1, 4))
        order = tuple(kind for i, kind in enumerate(drawn) if kind not in ONCE or kind not in drawn[:i])
        return self._demonstrate(compose("fresh", EVERY, "fresh", ANY, order, rng.randint(1, 3), rng), rates, slips)

    def drill(self, width: int = 64) -> tuple[list[int], list[bool]]:
        """A short random string of names and numbers, again and again: all but its first round can be copied."""
        words = self.rng.sample(self._words, self.rng.randint(3, 14))
        before = self.rng.choices(self._words, k=self.rng.randint(0, 8))
        ids = [*before, *words * (width // len(words) + 1)][:width]
        return ids, [i > len(before) + len(words) for i in range(width)]

    def _demonstrate(self, gold: GoldTask, rates: dict[str, float], slips: float = 0.0) -> tuple[list[int], list[bool]]:
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
        """A garbled turn that changes nothing, its tokens and the answers: a token wrong or gone, or the start gone."""
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


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(draw: Callable[[], tuple[list[int], list[bool]]], rng: Random, count: int, size: int) -> Iterator[Batch]:
    """`count` batches of ids [B, T], padded right, and targets [B, T] (−100 where nothing is learned).

    Four batches are drawn at a time and sorted by length, so that little is padding.
    """
    ready: list[list[tuple[list[int], list[bool]]]] = []
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


class _Row:
    """One rollout in the tick loop."""

    def __init__(self, gold: GoldTask, tok: PreTrainedTokenizerFast, seed: str) -> None:
        self.gold, self.tok = gold, tok
        self.episode = DeskEpisode(gold)
        self.forced = opening_ids(tok, self.episode)
        self.prompt = len(self.forced)
        self.random = torch.Generator().manual_seed(Random(seed).getrandbits(60))
        self.turn: list[int] = []
        self.turns = self.length = 0
        self.done = False

    def next(self, logits: torch.Tensor | None) -> int:
        """The token that this row feeds next."""
        self.length += 1
        if self.forced:
            return self.forced.pop(0)
        assert logits is not None
        token = int(torch.multinomial(logits.softmax(-1), 1, generator=self.random))
        self.turn.append(token)
        if token == self.tok.eos_token_id:
            self._end([])
        elif self.episode.format.stop and str(self.tok.decode(self.turn[-12:])).endswith(self.episode.format.stop):
            self._end([self.tok.eos_token_id])
        if self.length - self.prompt >= 400:
            self.done = True
        return token

    def _end(self, glue: list[int]) -> None:
        actions = self.episode.format.parse(str(self.tok.decode(self.turn)))
        self.turn, self.turns = [], self.turns + 1
        reply = self.episode.step([action.body for action in actions])
        self.done = reply.done or not actions or self.turns >= 20
        self.forced = glue + glue_ids(self.tok, reply.observations)


@torch.no_grad()
def sample(model: Any, tok: PreTrainedTokenizerFast, golds: Sequence[GoldTask], seed: str) -> list[_Row]:
    """One rollout a task at temperature 1. Every row is fed one token a tick, so no row is padded."""
    model.eval()
    rows = [_Row(gold, tok, f"{seed} {gold.task.id}") for gold in golds]
    cache, logits = DynamicCache(), None
    while not all(row.done for row in rows):
        fed = [
            tok.pad_token_id if row.done else row.next(None if logits is None else logits[i])
            for i, row in enumerate(rows)
        ]
        logits = model(input_ids=torch.tensor(fed)[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    return rows


def measure(model: Any, tok: PreTrainedTokenizerFast, split: str, seed: str = "measure") -> dict[str, Any]:
    """Success (TGC; SGC: all variants of a scenario), fault shares and sizes on a split."""
    golds = [gold_task(task_id) for task_id in task_ids(split)]
    start = time.perf_counter()
    rows = sample(model, tok, golds, seed)
    outcomes = [DeskEvaluator().evaluate_gold(row.gold, row.episode.end_state()) for row in rows]
    scenarios: dict[str, list[bool]] = {}
    families: dict[str, list[bool]] = {}
    for gold, outcome in zip(golds, outcomes, strict=True):
        scenarios.setdefault(gold.task.scenario_id, []).append(bool(outcome.success))
        families.setdefault(gold.task.metadata["family"], []).append(bool(outcome.success))
    faults = Counter(fault for outcome in outcomes for fault in outcome.faults)
    return {
        "split": split,
        "tgc": round(mean(bool(outcome.success) for outcome in outcomes), 3),
        "sgc": round(mean(all(wins) for wins in scenarios.values()), 3),
        "faults": {fault: round(faults[fault] / len(rows), 3) for fault in sorted({*FAULTS, *faults})},
        "families": {name: round(mean(wins), 2) for name, wins in families.items()},
        "tokens": round(mean(row.length for row in rows), 1),
        "prompt": round(mean(row.prompt for row in rows), 1),
        "turns": round(mean(row.turns for row in rows), 1),
        "wall_s": round(time.perf_counter() - start, 1),
    }


def main(words: Sequence[str]) -> None:
    """Build or measure."""
    opt = options(words)
    torch.set_num_threads(opt.threads)
    if opt.measure:
        built: Any = AutoTokenizer.from_pretrained(opt.measure)
        policy = AutoModelForCausalLM.from_pretrained(opt.measure)
        print(json.dumps(measure(policy, built, opt.split, f"measure {opt.seed}"), indent=1))
        return
    torch.manual_seed(opt.seed)
    tok = tokenizer()
    model: Any = AutoModelForCausalLM.from_pretrained(opt.start) if opt.start else network(tok)
    print(f"{model.num_parameters():,} parameters, {len(tok)} tokens")
    if not opt.start:
        teacher = Teacher(tok, f"clean {opt.seed}")
        clone(model, batches(teacher.drill, teacher.rng, opt.drill, opt.batch), opt.drill, opt.lr, "drill", decay=False)
        clean = batches(lambda: teacher.episode({}), teacher.rng, opt.clean, opt.batch)
        clone(model, clean, opt.clean, opt.lr, "clean")
    if opt.broad:
        broad = Teacher(tok, f"broad {opt.seed}")
        clone(model, batches(lambda: broad.mixed({}), broad.rng, opt.broad, opt.batch), opt.broad, opt.lr / 2, "broad")
        print(json.dumps(measure(model, tok, opt.split), indent=1))
    if opt.faulty:
        erring = Teacher(tok, f"faulty {opt.seed}")
        faulty = batches(lambda: erring.mixed(RATES, SLIPS), erring.rng, opt.faulty, opt.batch)
        clone(model, faulty, opt.faulty, opt.lr / 2, "faulty")
    out = Path(opt.out)
    tok.save_pretrained(out)
    model.save_pretrained(out)
    for split in ("test_normal", "test_challenge"):
        print(json.dumps(measure(model, tok, split), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
