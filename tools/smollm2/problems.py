"""Write word problems as JSONL. The answer of a problem is a calculation with the numbers.

    python tools/smollm2/problems.py OUT [--steps 2,3]

writes ``train.jsonl`` and ``held_out.jsonl``.

- The files share no name, no thing and no calculation: no two problems have the same numbers, in
  any order.
- If all problems have one step, the files share no wording either. Problems of several steps are
  made of the same sentences in both files.
- The answer is a calculation: ``\\boxed{5 + 7}`` in one step, ``\\boxed{(12 - 5) * 3}`` in two. The
  label is the result of the calculation.
- A prompt is a chat. If all problems have one step, the chat begins with four solved examples. No
  problem has the numbers of an example.
- Problems of several steps have no examples: the worked answers in the column ``response`` are for
  ``megatron-dppo sft``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.process.files import replace_file

TRAIN = 3072
HELD_OUT = 400
"""Problems per file."""
SEED = 2
MOST = 500
"""Largest result of a clause in a problem of several steps."""
KINDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
"""``data_source`` of a problem, by its operation."""


class Language(NamedTuple):
    """Words of problems. ``{n}`` is a name, ``{t}`` a thing; ``{a}``, ``{b}``, ``{c}`` are
    numbers."""

    wordings: dict[str, tuple[str, ...]]
    """Problems of one step, by operation: ``{a} operation {b}`` is the answer."""
    names: tuple[str, ...]
    things: tuple[str, ...]


LANGUAGE = {
    "train": Language(
        {
            "+": (
                "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
                "{n} found {a} {t} in the morning and {b} {t} in the evening. How many {t} did {n} "
                "find?",
                "There are {a} {t} in one box and {b} {t} in another box. How many {t} are there "
                "in total?",
                "{n} walked {a} meters, took a rest, and then walked another {b} meters. How far "
                "did {n} walk?",
                "A bus has {a} passengers. Then {b} more get in. How many passengers are in the "
                "bus?",
                "A plant was {a} centimeters tall and grew {b} centimeters. How tall is it now?",
                "{n} spent {a} euros on food and {b} euros on clothes. How much did {n} spend?",
                "A choir of {a} singers is joined by {b} guests. How many people sing?",
                "{n} collected {a} {t}, and a friend gave {n} {b} more. How many {t} does {n} own?",
                "The first act lasts {a} minutes and the second act {b} minutes. How long is the "
                "show?",
                "A tank holds {a} liters of water. {n} pours in {b} liters. How much water does it "
                "hold then?",
                "{n} sent {a} letters in May and {b} letters in June. How many letters did {n} "
                "send in both months?",
            ),
            "-": (
                "{n} has {a} {t} and gives away {b} of them. How many {t} are left?",
                "There were {a} {t} on the table. {n} took {b} of them. How many {t} remain?",
                "{n} had {a} euros and paid {b} euros for a toy. How many euros does {n} have now?",
                "A baker made {a} rolls and {b} of them burned. How many rolls are good?",
                "Of {a} students, {b} are absent today. How many students are present?",
                "{n} must drive {a} miles and has driven {b} miles so far. How many miles remain?",
                "A coat cost {a} euros and is now {b} euros cheaper. What does it cost now?",
                "{n} baked {a} {t}, and the guests ate {b}. How many {t} did the guests leave?",
                "The tower is {a} meters high, the house {b} meters. How much higher is the tower?",
                "{n} has {a} {t}, which is {b} more than a friend has. How many {t} does the "
                "friend have?",
                "A jar with {a} {t} fell, and {b} broke. How many {t} are whole?",
                "{n} needs {a} points to win and has {b} points. How many points does {n} still "
                "need?",
            ),
            "*": (
                "{n} has {a} boxes with {b} {t} in each box. How many {t} does {n} have?",
                "{n} buys {b} {t} every day for {a} days. How many {t} does {n} buy?",
                "One cake needs {a} spoons of sugar. How many spoons do {b} cakes need?",
                "A hall has {a} tables, and {b} people sit at each table. How many people are in "
                "the hall?",
                "{n} earns {a} euros per hour and works {b} hours. How much does {n} earn?",
                "Every one of {a} cats eats {b} fish. How many fish do they eat together?",
                "A wall has {a} rows of {b} stones. How many stones is the wall made of?",
                "{n} writes {a} lines on every page. How many lines are on {b} pages?",
                "A car has {b} seats. How many people can ride in {a} such cars?",
                "{n} drinks {a} glasses of water a day. How many glasses is that in {b} days?",
                "Each of {a} shelves carries {b} {t}. How many {t} are on the shelves?",
                "A lamp uses {a} watts. How many watts do {b} such lamps use?",
            ),
            "/": (
                "{n} shares {a} {t} equally among {b} friends. How many {t} does each friend get?",
                "{n} puts {a} {t} into bags of {b} {t} each. How many bags are there?",
                "{b} tickets cost {a} euros together. How much is one ticket?",
                "A wire of {a} meters is cut into {b} equal pieces. How long is each piece?",
                "{n} reads {a} pages in {b} days, the same number every day. How many pages is "
                "that per day?",
                "A team of {a} players is divided into {b} equal teams. How many players are in "
                "each?",
                "{n} plants {a} trees in {b} equal rows. How many trees stand in each row?",
                "A bottle of {a} liters fills {b} glasses alike. How many liters are in a glass?",
                "{a} {t} lie in {b} drawers, equally many in each. How many {t} are in a drawer?",
                "{n} saves {b} euros a week. After how many weeks does {n} have {a} euros?",
                "A boat carries {b} people at a time. How many trips are needed for {a} people?",
                "{n} ran {a} kilometers in {b} equal rounds. How long is one round?",
            ),
        },
        ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Iris", "Jonas"),
        (
            "apples",
            "books",
            "cookies",
            "marbles",
            "stickers",
            "pencils",
            "coins",
            "shells",
            "cards",
            "buttons",
        ),
    ),
    "held_out": Language(
        {
            "+": (
                "A farmer sold {a} {t} on Monday and {b} {t} on Tuesday. How many {t} were sold "
                "altogether?",
                "{n} has {a} points and wins another {b} points. What is the score of {n}?",
                "A train carried {a} people. At a station {b} people got on. How many people are "
                "on the train now?",
                "The red team scored {a} points and the blue team scored {b} points. What is the "
                "sum of their points?",
                "{n} counted {a} birds before lunch and {b} birds after lunch. How many birds were "
                "counted?",
                "A library owned {a} {t} and was given {b} {t}. How many {t} does the library own?",
            ),
            "-": (
                "A shop had {a} {t}. It sold {b}. How many {t} does the shop still have?",
                "{n} wants to read a novel of {a} chapters and has read {b}. How many chapters are "
                "left to read?",
                "A rope is {a} meters long. {n} cuts off {b} meters. How long is the rope now?",
                "{n} saved {a} dollars and spent {b} dollars. How much money does {n} have left?",
                "A parking lot has room for {a} cars, and {b} cars stand there. How many cars "
                "still fit?",
                "A sack holds {a} pounds of rice. {n} uses {b} pounds. How many pounds stay in the "
                "sack?",
            ),
            "*": (
                "A movie costs {a} dollars a person. How much do {b} people pay?",
                "There are {a} rows of chairs with {b} chairs in each row. How many chairs are "
                "there?",
                "{n} swims {a} laps every week. How many laps does {n} swim in {b} weeks?",
                "Each of {a} students brings {b} {t}. How many {t} do they bring?",
                "A printer prints {a} sheets a minute. How many sheets does it print in {b} "
                "minutes?",
                "{n} packs {b} {t} into every one of {a} baskets. How many {t} are packed?",
            ),
            "/": (
                "{a} {t} are packed into {b} equal crates. How many {t} are in each crate?",
                "{n} paid {a} dollars for {b} shirts of the same price. How much did one shirt "
                "cost?",
                "A class of {a} children is split into groups of {b}. How many groups are there?",
                "A machine makes {a} {t} in {b} hours. How many {t} does it make per hour?",
                "{n} cuts a ribbon of {a} inches into strips of {b} inches. How many strips are "
                "there?",
                "{b} workers split {a} dollars evenly. How many dollars does each worker receive?",
            ),
        },
        ("Olivia", "Peter", "Quinn", "Rosa", "Sam", "Tina"),
        ("tomatoes", "bottles", "flowers", "eggs", "spoons", "toys"),
    ),
}
CLAUSES: dict[str, tuple[str, ...]] = {
    "a": (
        "{n} has {a} {t}.",
        "{n} starts with {a} {t}.",
        "In the morning, {n} counts {a} {t}.",
        "At first, there are {a} {t} in the bag of {n}.",
        "{n} keeps {a} {t} in a drawer.",
        "{n} gets {a} {t} as a present.",
    ),
    "a * b": (
        "{n} has {a} boxes with {b} {t} in each box.",
        "{n} gets {b} {t} every day for {a} days.",
        "{n} fills {a} shelves, each with {b} {t}.",
        "Each of the {a} tables of {n} carries {b} {t}.",
        "{n} wins {b} {t} in each of {a} games.",
    ),
    "a / b": (
        "{n} is one of {b} children who share {a} {t} equally.",
        "{n} sorts {a} {t} into {b} equal heaps and takes one heap home.",
        "{b} friends, one of them {n}, divide {a} {t} fairly.",
        "{a} {t} fill {b} boxes alike, and {n} gets one of the boxes.",
    ),
    "x + b": (
        "{n} buys {b} more.",
        "A friend gives {n} {b} more.",
        "Then {n} finds {b} {t} in the cellar.",
        "An aunt brings {n} {b} {t}.",
        "{n} earns {b} more.",
        "Later, {b} {t} come with the mail.",
        "{n} discovers {b} more under the bed.",
        "{n} gets {b} {t} from a neighbor.",
    ),
    "x - b": (
        "{n} gives away {b}.",
        "Then {n} loses {b} of them.",
        "{n} sells {b} of the {t}.",
        "A neighbor borrows {b} of them.",
        "{b} of them get wet and are thrown out.",
        "{n} drops {b} of them into a river.",
        "{n} lends {b} {t} to a friend.",
        "At night, {b} of the {t} disappear.",
    ),
    "x * b": (
        "Soon {n} has {b} times as many.",
        "Within a year, the number of {t} becomes {b} times as large.",
        "Then {n} wins so many that there are {b} times as many as before.",
        "The next day there are {b} times as many.",
        "{n} trades them for {b} times as many {t}.",
        "A magician turns each of the {t} into {b}.",
    ),
    "x / b": (
        "{n} makes {b} equal piles of them and keeps only one pile.",
        "All of them go into {b} bags, equally many in each, and {n} keeps one bag.",
        "Of every {b} {t}, {n} keeps just one.",
        "{n} divides them fairly among {b} people and is one of these people.",
        "Only one in {b} of them is good, and {n} throws out the others.",
        "{n} cuts the number of {t} down to one part in {b}.",
    ),
    "x + b * c": (
        "{n} buys {b} bags with {c} {t} in each bag.",
        "Each of {b} friends gives {n} {c} more.",
        "Then {n} gets {c} more a day for {b} days.",
        "{n} opens {b} boxes and finds {c} {t} in each.",
        "{b} times, {n} goes out and comes back with {c} more.",
        "{b} children bring {n} {c} {t} each.",
    ),
    "x - b * c": (
        "{n} gives {c} of them to each of {b} friends.",
        "For {b} days, {n} loses {c} of them a day.",
        "{n} sells {b} packs of {c} {t}.",
        "{b} neighbors borrow {c} {t} each.",
        "{n} fills {b} bags with {c} of them each and gives the bags away.",
        "{b} times, {n} drops {c} of them.",
    ),
    "x + x * b": (
        "A friend has {b} times as many as {n}.",
        "For each of them, a friend has {b} {t}.",
        "{n} has a friend whose number of {t} is {b} times as large.",
        "A friend has {b} times that number.",
    ),
    "x + x + b": (
        "A friend has {b} more than {n}.",
        "A friend has as many as {n} and {b} more.",
        "{n} has a friend with {b} more.",
        "{n} needs {b} more to have as many as a friend.",
    ),
    "x + x - b": (
        "A friend has {b} fewer than {n}.",
        "That is {b} more than a friend has.",
        "A friend would need {b} more to have as many as {n}.",
        "{n} has a friend with {b} fewer.",
    ),
}
"""Sentences of problems of several steps, by calculation; ``x`` is the calculation of the sentences
before."""
QUESTIONS = (
    "How many {t} does {n} have now?",
    "How many {t} does {n} have in the end?",
    "What number of {t} is left for {n}?",
)
QUESTIONS_TOGETHER = (
    "How many {t} do they have together?",
    "How many {t} do {n} and the friend have in total?",
)
"""Questions after a comparison."""
EXAMPLES = (
    ("5 balls, then 7 more. How many?", "5 + 7"),
    ("18 sweets for 3 friends. How many each?", "18 / 3"),
    ("25 cups, 9 are taken. How many are left?", "25 - 9"),
    ("4 bags of 6 nuts. How many nuts?", "4 * 6"),
)


def find_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text, ascending."""
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


def compute_result(calculation: str) -> Fraction:
    """Return the result of a calculation."""
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", calculation)))


def make_single_step(language: Language, number: int, rng: random.Random) -> tuple[str, str]:
    """Return a question and the calculation that is the answer.

    Operations and wordings rotate with ``number``.
    """
    operation = "+-*/"[number % 4]
    wordings = language.wordings[operation]
    if operation in "*/":
        a = rng.randint(2, 99)
        b = rng.randint(2, 19)
        # A multiple of b, because the answer is a whole number.
        a *= b if operation == "/" else 1
    else:
        a, b = (round(10 ** rng.uniform(0.4, 2.6)) for _ in range(2))
        a, b = (max(a, b) + (a == b), min(a, b)) if operation == "-" else (a, b)
    names = {"n": rng.choice(language.names), "t": rng.choice(language.things)}
    return wordings[number // 4 % len(wordings)].format(a=a, b=b, **names), f"{a} {operation} {b}"


@functools.cache
def list_plans(steps: int) -> list[tuple[str, ...]]:
    """Return the lists of clauses with ``steps`` operations, without a comparison before the last
    clause."""
    firsts = [form for form in CLAUSES if "x" not in form]
    others = [form for form in CLAUSES if "x" in form]
    found = [
        plan
        for count in range(1, steps + 1)
        for plan in itertools.product(firsts, *[others] * count)
    ]
    found = [plan for plan in found if not any(map(is_comparison, plan[:-1]))]
    return [plan for plan in found if len(re.findall(r"[-+*/]", "".join(plan))) == steps]


def is_comparison(form: str) -> bool:
    """Return whether a clause is a comparison with a friend, before a question about both."""
    return form.startswith("x + x")


def make_multi_step(language: Language, steps: int, rng: random.Random) -> tuple[str, str]:
    """Return a question of several clauses, and the calculation that is the answer.

    The result of each clause is a whole number, 2 to ``MOST``.
    """
    plan = rng.choice(list_plans(steps))
    sentences = [rng.choice(CLAUSES[form]) for form in plan]
    ask = rng.choice(QUESTIONS_TOGETHER if is_comparison(plan[-1]) else QUESTIONS)
    names = {"n": rng.choice(language.names), "t": rng.choice(language.things)}
    # Draw numbers again until the results of all clauses are valid.
    while True:
        told = []
        answer = ""
        count = Fraction(0)
        loose = False
        for form, sentence in zip(plan, sentences, strict=True):
            drawn = {letter: str(sample_number(letter, form, rng)) for letter in "abc"}
            told.append(sentence.format(**drawn, **names))
            # A sum needs parentheses before a multiplication or division.
            x = f"({answer})" if loose and re.search(r"x [*/]", form) else answer
            answer = form.translate(
                {ord(letter): text for letter, text in {**drawn, "x": x}.items()}
            )
            loose = bool(re.search("[-+]", form))
            before = count
            count = compute_result(answer)
            if count.denominator > 1 or not (before if is_comparison(form) else 1) < count <= MOST:
                break
        else:
            return " ".join([*told, ask.format(**names)]), answer


def sample_number(letter: str, form: str, rng: random.Random) -> int:
    """Draw the number for a letter: a small number for a factor or divisor."""
    small = re.search(rf"[*/] {letter}|{letter} \*", form)
    return rng.randint(2, 12) if small else round(10 ** rng.uniform(0.4, 2.4))


def list_example_numbers() -> set[tuple[int, ...]]:
    """Return the numbers of each solved example."""
    return {find_numbers(question) for question, _ in EXAMPLES}


def generate_problems(
    split: str,
    count: int,
    used: set[tuple[int, ...]],
    steps: Sequence[int] = (1,),
) -> Iterator[dict[str, object]]:
    """Yield rows of a split, with step counts that rotate through ``steps``.

    Add the numbers of each problem to ``used``, because no two problems have the same numbers.
    """
    language = LANGUAGE[split]
    rng = random.Random(f"{SEED} {split}")
    for number in range(count):
        turn, place = divmod(number, len(steps))
        operations = steps[place]
        question = ""
        while not question or find_numbers(question) in used:
            if operations == 1:
                question, answer = make_single_step(language, turn, rng)
                source = KINDS["+-*/"[turn % 4]]
            else:
                question, answer = make_multi_step(language, operations, rng)
                source = f"{operations} steps"
        used.add(find_numbers(question))
        prompt = build_chat(question, EXAMPLES if max(steps) == 1 else ())
        yield {
            "prompt": prompt,
            "label": str(compute_result(answer)),
            "response": f"\\boxed{{{answer}}}",
            "data_source": source,
        }


def build_chat(question: str, examples: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return messages with solved examples and a question."""
    shown = [
        {"role": role, "content": content}
        for asked, answer in examples
        for role, content in (("user", asked), ("assistant", f"\\boxed{{{answer}}}"))
    ]
    return [
        {"role": "system", "content": "Write the calculation."},
        *shown,
        {"role": "user", "content": question},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder to write into")
    parser.add_argument(
        "--steps",
        default="1",
        help="operations of a problem, 1 to 3; problems take turns by 2,3 (default: 1)",
    )
    options = parser.parse_args()
    if not re.fullmatch("[123](,[123])*", options.steps):
        parser.error(
            f"--steps is {options.steps}: give numbers from 1 to 3, with commas between them, such "
            "as 2,3"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    steps = list(map(int, options.steps.split(",")))
    used = list_example_numbers()
    for split, count in (("held_out", HELD_OUT), ("train", TRAIN)):
        rows = [json.dumps(row) + "\n" for row in generate_problems(split, count, used, steps)]
        with replace_file(options.out / f"{split}.jsonl") as draft:
            draft.write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
