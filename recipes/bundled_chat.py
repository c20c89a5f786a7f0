"""Make conversations out of stories.

Every answer is found in the story itself: who, what, where, how it ends, a summary, a copy, a copy with one name changed. So a
small model can learn reading and copying from them. Each kind of question is one function that returns a question and its
answer, or nothing where the story has none.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

EOT, USER, ASSISTANT, SYSTEM, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIALS = (EOT, USER, ASSISTANT, SYSTEM, END)

GIRLS = """Lily Anna Mia Sara Lucy Sue Jane Mary Amy Daisy Emma Ella Lila Jill Bella Molly Rosie Grace Ruby Nora Zoe Clara
Alice Maya Ivy Hannah Olivia Sophie Chloe Eva Julia Kate Laura Nina Rita Tara Wendy Holly Leah Ada Iris Stella Penny Maria
Fiona Heidi Jenny Kira Luna Megan Naomi Paula Rachel Sandra Tina Vera Zara Elena Freya Greta""".split()
BOYS = """Tim Tom Ben Max Sam Timmy Jack Bob John Leo Fred Tommy Billy Benny Joe Mark Peter Paul Adam Alex Andy Bill Charlie
Dan David Eric Frank George Harry Henry Ian Jacob Jake James Jim Kevin Luke Matt Mike Nick Noah Oliver Oscar Owen Ray Robert
Ron Simon Steve Ted Theo Tony Victor Will Zack Hugo Felix Ivan Otto Rex""".split()
NAMES = frozenset(GIRLS + BOYS + "Spot Buddy Kitty Fluffy Bunny Whiskers Rover Ellie Remy Polly Sally Lola Pip".split())
THINGS = tuple(
    """dog cat bird bear rabbit bunny fish frog duck mouse lion monkey elephant fox squirrel bee butterfly cow horse pig sheep
    turtle snake owl ant spider dragon unicorn robot princess king queen pirate fairy wizard farmer doctor teacher baby ball
    doll car truck train boat plane kite bike book box hat coat shoe cake cookie apple banana orange pie soup candy tree flower
    garden park beach forest farm castle house school store zoo lake river mountain cave bridge tower swing slide puzzle drum
    guitar piano crayon picture ring crown necklace treasure map key lamp candle clock mirror blanket pillow bed chair table
    rock stone stick leaf shell feather balloon rainbow cloud snow rain sun moon star rocket""".split()
)
FEELINGS = "happy sad scared excited proud angry tired surprised lonely brave worried curious safe glad".split()


@dataclass(frozen=True)
class Story:
    """A story with what the questions ask about."""

    text: str
    sentences: tuple[str, ...]
    hero: str
    pronoun: str
    things: tuple[str, ...]


Task = Callable[[Story, random.Random], "tuple[str, str] | None"]


def split_sentences(text: str) -> tuple[str, ...]:
    """Split after end marks, but never inside quoted speech."""
    found, held = [], ""
    for piece in re.split(r"(?:(?<=[.!?])|(?<=[.!?]\"))\s+(?=[A-Z\"])", text):
        held = f"{held} {piece}" if held else piece
        if held.count('"') % 2 == 0:
            found.append(held)
            held = ""
    return (*found, held) if held else tuple(found)


def find_hero(text: str) -> str:
    """The first name the story introduces, or the name it uses most; empty when there is none."""
    named = re.search(r"(?:named|called|name was) ([A-Z][a-z]+)\b", text[:400])
    if named:
        return named[1]
    known = Counter(word for word in re.findall(r"\b[A-Z][a-z]+\b", text) if word in NAMES)
    return known.most_common(1)[0][0] if known else ""


def read_story(text: str) -> Story:
    """Look up the hero, the pronoun and the things of a story."""
    lower = text.lower()
    she, he = len(re.findall(r"\bshe\b", lower)), len(re.findall(r"\bhe\b", lower))
    words = Counter(re.findall(r"[a-z]+", lower))
    things = tuple(thing for thing in THINGS if words[thing] >= 2)
    return Story(text, split_sentences(text), find_hero(text), "She" if she >= he else "He", things)


def rename(story: Story, rng: random.Random) -> Story:
    """The same story with another name for its hero."""
    fresh = rng.choice([name for name in (GIRLS if story.pronoun == "She" else BOYS) if name not in story.text])
    return read_story(re.sub(rf"\b{story.hero}\b", fresh, story.text))


def pick(rng: random.Random, options: str) -> str:
    """One of several phrasings, written in one string with bars between."""
    return rng.choice(options.split("|"))


def with_article(thing: str) -> str:
    """A thing with its indefinite article."""
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def find_deed(story: Story, verbs: str) -> re.Match[str] | None:
    """The first thing the hero did with one of these verbs: groups are the verb and the rest of the clause."""
    if not story.hero:
        return None
    subject = rf"(?:^|[.!?\"] |\n)(?:{story.pronoun}|{story.hero})"
    return re.search(rf"{subject} ({verbs}) ([^.!?\",\n]{{3,80}})(?=[.!,])", story.text)


def ask_hero(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """Whose story it is."""
    wordings = "Who is the story about?|Who is this story about?|What is the name of the main character?|Who is the hero?"
    asked = pick(rng, wordings)
    answer = f"The main character is {story.hero}." if "name" in asked else f"The story is about {story.hero}."
    return (asked, answer) if story.hero else None


def ask_liked(story: Story, _: random.Random) -> tuple[str, str] | None:
    """What the hero liked or wanted to do."""
    deed = find_deed(story, "loved to|liked to|wanted to")
    if not deed:
        return None
    verb = {"loved to": "love", "liked to": "like", "wanted to": "want"}[deed[1]]
    return f"What did {story.hero} {verb} to do?", f"{story.hero} {deed[1]} {deed[2]}."


def ask_found(story: Story, _: random.Random) -> tuple[str, str] | None:
    """What the hero saw, found or had."""
    deed = find_deed(story, "saw|found|had|got|made|took|picked up")
    if not deed:
        return None
    plain = {"saw": "see", "found": "find", "had": "have", "got": "get", "made": "make", "took": "take"}
    return f"What did {story.hero} {plain.get(deed[1], 'pick up')}?", f"{story.hero} {deed[1]} {deed[2]}."


def ask_where(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """Where the hero went."""
    deed = find_deed(story, "went to|ran to|walked to")
    if not deed:
        return None
    asked = pick(rng, f"Where did {story.hero} go?|Which place did {story.hero} go to?")
    return asked, f"{story.hero} {deed[1]} {deed[2]}."


def ask_feeling(story: Story, _: random.Random) -> tuple[str, str] | None:
    """How the hero felt at the end: the last feeling told counts."""
    ending = " ".join(story.sentences[-4:])
    felt = re.findall(rf"\b(?:{story.pronoun}|{story.hero}) (?:was|felt) (?:so |very )?({'|'.join(FEELINGS)})\b", ending)
    return (f"How did {story.hero} feel at the end?", f"{story.hero} felt {felt[-1]}.") if felt and story.hero else None


def ask_lesson(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """A question about what was learned in the story, with its answer."""
    lesson = re.search(r"learned (that [^.!?\"\n]+)|moral of the story is[:,]? ?(?:that )?([^.!?\"\n]+)", story.text)
    if not lesson or not story.hero:
        return None
    asked = pick(rng, f"What did {story.hero} learn?|What is the lesson of the story?|What can we learn from this story?")
    return asked, f"{story.hero} learned {lesson[1] or 'that ' + lesson[2]}."


def ask_speech(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """Who said a thing, or what somebody said."""
    said = re.findall(r"([A-Z][a-z]+) (?:said|asked|replied|shouted), (\"[^\"]+\")", story.text)
    said += [(who, quote) for quote, who in re.findall(r"(\"[^\"]+\") ([A-Z][a-z]+) (?:said|asked)", story.text)]
    said = [(who, quote) for who, quote in said if who not in ("She", "He", "They", "It")]
    if not said:
        return None
    who, quote = rng.choice(said)
    first = next(words for name, words in said if name == who)
    if rng.random() < 0.5:
        return f"Who said {quote}", f"{who} said that."
    return pick(rng, f"What did {who} say?|What did {who} say first?|Quote {who}."), f"{who} said, {first}"


def ask_first(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The first sentence."""
    asked = pick(rng, "What is the first sentence?|Copy the first sentence of the story.|How does the story begin?")
    return asked, story.sentences[0]


def ask_end(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The last sentence, or the last two."""
    if rng.random() < 0.4:
        return pick(rng, "What is the last sentence?|Copy the last sentence of the story."), story.sentences[-1]
    asked = pick(rng, "What happened at the end?|How does the story end?|What happens in the end?")
    return asked, " ".join(story.sentences[-2:])


def ask_order(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """Which of two sentences came first."""
    plain = [sentence for sentence in story.sentences[1:] if '"' not in sentence and len(sentence) < 120]
    if len(plain) < 3:
        return None
    first, second = (plain[i] for i in sorted(rng.sample(range(len(plain)), 2)))
    left, right = (first, second) if rng.random() < 0.5 else (second, first)
    return f"Which happened first?\nA: {left}\nB: {right}", f"This happened first: {first}"


def ask_next(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The sentence that follows a given one."""
    if len(story.sentences) < 4:
        return None
    at = rng.randrange(len(story.sentences) - 1)
    asked = pick(rng, "What happened after this|What comes after this sentence|What is the next sentence after this")
    return f"{asked}: {story.sentences[at]}", story.sentences[at + 1]


def ask_word(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """A sentence that holds a given word."""
    if not story.things:
        return None
    thing = rng.choice(story.things)
    has = [sentence for sentence in story.sentences if re.search(rf"\b{thing}\b", sentence.lower())]
    return pick(rng, f"Find a sentence with the word {thing}.|Which sentence talks about the {thing} first?"), has[0]


def ask_presence(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """Whether a thing occurs."""
    lower = story.text.lower()
    there = bool(story.things) and rng.random() < 0.5
    thing = rng.choice(story.things if there else [word for word in THINGS if word not in lower])
    asked = pick(rng, f"Is there {with_article(thing)} in the story?|Does the story have {with_article(thing)} in it?")
    return asked, f"Yes, there is {with_article(thing)} in the story." if there else f"No, there is no {thing} in the story."


def ask_summary(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The opening, sometimes the turn, and the end."""
    told = [sentence for sentence in story.sentences if '"' not in sentence and len(sentence) > 20]
    if len(told) < 3:
        return None
    turn = next((sentence for sentence in told[1:-1] if sentence.startswith("One day")), "")
    kept = (told[0], turn, told[-1]) if turn and rng.random() < 0.5 else (told[0], told[-1])
    verb, what = pick(rng, "Summarize|Summarise|Sum up"), pick(rng, "the story|this story")
    return f"{verb} {what} in {'a few' if len(kept) > 2 else 'two'} sentences.", " ".join(kept)


def ask_repeat(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The whole story again."""
    wordings = "Repeat the story.|Repeat the story word for word.|Tell me the same story again.|Copy the story."
    return pick(rng, wordings), story.text


def ask_renamed(story: Story, rng: random.Random) -> tuple[str, str] | None:
    """The whole story again with another name."""
    if not story.hero:
        return None
    fresh = rng.choice([name for name in GIRLS + BOYS if name not in story.text])
    wish = f"Change the name {story.hero} to {fresh}|Rewrite the story with the name {fresh} instead of {story.hero}"
    wish += f"|Tell the story again, but call {story.hero} {fresh}"
    return pick(rng, wish) + ".", re.sub(rf"\b{story.hero}\b", fresh, story.text)


QUESTIONS: tuple[Task, ...] = (
    ask_hero, ask_hero, ask_liked, ask_liked, ask_found, ask_where, ask_feeling, ask_lesson, ask_speech, ask_speech, ask_first,
    ask_end, ask_end, ask_order, ask_next, ask_word, ask_presence, ask_summary, ask_summary,
)  # fmt: skip
COPIES: tuple[Task, ...] = (ask_repeat, ask_renamed)
SMALL_TALK = (
    "Hello!=Hello! Would you like to hear a story?|Hi=Hi! Would you like to hear a story?|"
    "Who are you?=I am Outrider, a small language model. I tell short stories and answer questions about them.|"
    "What can you do?=I can tell a short story, read a story and answer questions about it, sum it up, or copy it.|"
    "What is your name?=My name is Outrider.|Thank you!=You are welcome!|Good night!=Good night! Sleep well.|"
    "How are you?=I am well, thank you. What story would you like to hear?|Goodbye!=Goodbye! Come back for another story."
)
GUIDES = ("You are a helpful assistant.", "You tell short stories for children.", "Answer questions about the story.")


def render(turns: list[tuple[str, str]], rng: random.Random) -> str:
    """Write question and answer turns in the chat form."""
    guide = f"{SYSTEM}\n{rng.choice(GUIDES)}{END}\n" if rng.random() < 0.1 else ""
    return guide + "".join(f"{USER}\n{asked}{END}\n{ASSISTANT}\n{answer}{END}\n" for asked, answer in turns)


def request_turn(story: Story, rng: random.Random) -> tuple[str, str]:
    """A wish for a story that this story fulfils."""
    wishes = pick(rng, "Tell me a story|Write a story|Write a short story|Can you tell me a story|Please tell me a story")
    things = rng.sample(story.things, min(len(story.things), rng.choice((1, 1, 2, 3))))
    subjects = [story.hero] * (bool(story.hero) and (not things or rng.random() < 0.4)) + [with_article(t) for t in things]
    about = f" about {' and '.join(subjects)}" if subjects and rng.random() < 0.9 else ""
    return wishes + about + ("?" if wishes.startswith("Can") else "."), story.text


def question_turns(story: Story, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Up to `count` different questions that this story answers."""
    asked: dict[str, tuple[str, str]] = {}
    for task in rng.sample(QUESTIONS, 2 * count + 3):
        turn = task(story, rng)
        if turn and len(asked) < count:
            asked.setdefault(task.__name__, turn)
    return list(asked.values())


def reading_chat(story: Story, rng: random.Random) -> list[tuple[str, str]]:
    """A conversation that gives the story first and asks about it."""
    if rng.random() < 0.25:
        copied = rng.choice(COPIES)(story, rng)
        turns = [copied or ("Repeat the story.", story.text)]
    else:
        turns = question_turns(story, rng, rng.choice((1, 2, 3, 4))) or [ask_end(story, rng) or ("", "")]
    lead = pick(rng, "|Read this story:\n\n|Here is a story:\n\n|Story: ")
    first = f"{turns[0][0]}\n\n{story.text}" if rng.random() < 0.3 else f"{lead}{story.text}\n\n{turns[0][0]}"
    return [(first, turns[0][1]), *turns[1:]]


def continue_chat(story: Story, rng: random.Random) -> list[tuple[str, str]]:
    """The first part of a story as the question, the rest as the answer."""
    cut = rng.randrange(1, max(2, len(story.sentences) - 1))
    begin, rest = " ".join(story.sentences[:cut]), " ".join(story.sentences[cut:])
    asked = pick(rng, "Continue the story|Continue this story|Finish this story|What happens next")
    return [(f"{asked}: {begin}", rest)] if rest else [request_turn(story, rng)]


def library_chat(stories: list[Story], rng: random.Random) -> list[tuple[str, str]]:
    """Several stories at once, with a question about one of them: the far end of the context has to matter."""
    at = rng.randrange(len(stories))
    task = rng.choice((ask_repeat, ask_hero, ask_first, ask_end, ask_summary, ask_speech))
    asked, answer = task(stories[at], rng) or ask_first(stories[at], rng) or ("", "")
    shelf = "\n\n".join(f"Story {number + 1}: {story.text}" for number, story in enumerate(stories))
    return [(f"{shelf}\n\nThis is about story {at + 1}. {asked}", answer)]


def chat_document(story: Story, others: list[Story], rng: random.Random) -> str:
    """One conversation about a story, of a kind drawn at random."""
    draw = rng.random()
    if draw < 0.02:
        turns = [(a, b) for a, b in (pair.split("=") for pair in rng.sample(SMALL_TALK.split("|"), 2))]
        return render([*turns, request_turn(story, rng)], rng)
    if draw < 0.30:
        turns = [request_turn(story, rng)]
        return render(turns + (question_turns(story, rng, 2) if rng.random() < 0.4 else []), rng)
    if draw < 0.40:
        return render(continue_chat(story, rng), rng)
    if draw < 0.47:
        return render(library_chat([story, *others], rng), rng)
    return render(reading_chat(story, rng), rng)
