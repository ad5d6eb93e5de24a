"""The words that `write_prompts` makes prompts of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A text, or a text with the words that fill it.
Pattern = str | tuple[str, Mapping[str, Sequence[Any]]]


def _words(text: str) -> list[str]:
    """Returns the words of a list with commas."""
    return text.replace("\n", " ").split(", ")


# Texts that signs show
# --------------------------------------------------------------------------------------------------

_FIRST = _words(
    """Golden, Harbor, Little, Old Mill, Riverside, Silver, Sunny, Blue Door, Corner, Maple,
Northern, Green Lane, Lucky, Hillside, Velvet, Copper"""
)
_SHOP = _words(
    """Bakery, Books, Cafe, Cinema, Dental Clinic, Diner, Florist, Garage, Hotel, Library, Music
School, Noodles, Pharmacy, Tailor, Toys, Tea Room"""
)
_GOODS = _words(
    """Peaches, Honey, Olive Oil, Rye Bread, Coffee Beans, Lemonade, Goat Cheese, Blueberries, Green
Tea, Apple Juice, Mustard, Walnuts, Cherry Jam, Soap"""
)
_KIND_OF_GOODS = _words(
    """Fresh, Organic, Mountain, Grandma's, Wild, Roasted, Pure, Farm, Winter, Sweet"""
)
_TITLE = _words(
    """Silent, Last, Paper, Hidden, Crooked, Distant, Midnight, Broken, Wandering, Second, Frozen,
Forgotten"""
)
_TITLE_OF = _words(
    """Garden, Lighthouse, Orchard, Station, Mirror, Voyage, Clockmaker, River, Kingdom,
Telescope, Neighbor, Winter"""
)
_GREETING = _words(
    """Good luck, Welcome, Thank you, Well done, Get well, Congratulations, Happy birthday, See you
soon"""
)
_NAME = _words(
    """Amara, Bruno, Chloe, Dmitri, Elena, Farid, Grace, Hiro, Ines, Jonas, Kavya, Liam, Mei, Noah,
Olga, Pedro, Quinn, Rosa, Sven, Tariq"""
)
_DO = _words("close, lock, keep clear of, do not touch, do not block, wait behind")
_THING = _words("the gate, the door, the fence, the ramp, the barrier, the lift")

# kind -> patterns.
TEXTS: dict[str, list[Pattern]] = {
    "shop": [
        ("{first} {shop}", {"first": _FIRST, "shop": _SHOP}),
    ],
    "label": [
        ("{kind} {goods}", {"kind": _KIND_OF_GOODS, "goods": _GOODS}),
        ("{goods}, 2 for {price}", {"goods": _GOODS, "price": range(3, 8)}),
        ("{percent}% off {goods}", {"percent": (10, 20, 25, 40), "goods": _GOODS}),
    ],
    "title": [
        ("The {title} {of}", {"title": _TITLE, "of": _TITLE_OF}),
        ("A {title} {of}", {"title": _TITLE[:6], "of": _TITLE_OF}),
        ("Return to the {title} {of}", {"title": _TITLE[6:9], "of": _TITLE_OF}),
    ],
    "greeting": [
        ("{greeting}, {name}!", {"greeting": _GREETING, "name": _NAME}),
        ("{name} & {other}", {"name": _NAME[:10], "other": _NAME[10:]}),
    ],
    "notice": [
        ("Please {do} {thing}", {"do": _DO, "thing": _THING}),
        ("Open until {hour} pm", {"hour": range(4, 12)}),
        ("Back at {hour}:{minute}", {"hour": range(1, 13), "minute": (15, 30, 45)}),
        ("Closed on {day}s", {"day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")}),
        "Wet Paint",
        "Mind the Step",
        "No Exit",
        "Quiet Please",
        "Lost and Found",
        "Staff Only",
        "Beware of the Dog",
        "Push to Open",
    ],
    "number": [
        ("Platform {number}", {"number": range(1, 19)}),
        ("Room {number}", {"number": range(101, 400, 17)}),
        ("Gate {letter}{number}", {"letter": "ABCD", "number": range(1, 30, 4)}),
        ("{number} km to {town}", {"number": (3, 12, 47), "town": ("Ashby", "Torvik", "Lindau")}),
        ("Bus {number}", {"number": range(7, 99, 6)}),
    ],
}
# Where such a text may stand; {} is the text in quotes.
SIGNS = {
    "shop": (
        "A wooden shop sign above a green door with the words {}",
        "A neon sign over a shop window that reads {}",
        "A small street corner with an awning that says {}",
        "A delivery van parked at the kerb with {} painted on its side",
        "A paper cup on a cafe table printed with {}",
        "A brick building whose faded wall still advertises {}",
        "A waiter in an apron embroidered with {}",
        "A glass door with the name {} in gold letters",
        "A tote bag hanging from a chair, printed with {}",
        "A business card on a dark desk that reads {}",
        "A hand-drawn map of a village with a house marked {}",
    ),
    "label": (
        "A paper label on a glass jar that reads {}",
        "A market stall with a cardboard sign that says {}",
        "A wooden crate stamped with {}",
        "A supermarket shelf with a price card that reads {}",
        "A chalkboard beside a basket that says {}",
        "A tin can on a kitchen counter with the label {}",
        "A roadside stand with a painted board that reads {}",
        "A leaflet on a doormat that announces {}",
        "A bottle on a picnic blanket labelled {}",
    ),
    "title": (
        "A book cover on a desk with the title {}",
        "A poster in a museum hall that announces {}",
        "A cinema marquee that shows {}",
        "The spine of an old leather book with the title {} in gilt",
        "A record sleeve leaning on a shelf, titled {}",
        "A theatre programme on a red velvet seat with the words {}",
        "A comic book on a carpet whose cover says {}",
        "A painted banner over a stage that reads {}",
    ),
    "greeting": (
        "A birthday cake with {} written in icing",
        "A greeting card on a windowsill that says {}",
        "A banner between two trees that reads {}",
        "A heart in the wet sand around the words {}",
        "A school blackboard on which somebody has written {}",
        "A luggage tag that says {} in blue ink",
        "A balloon in a living room printed with {}",
        "A wooden bench with {} carved into its back",
        "A note on a refrigerator door that says {}",
        "A mug on a desk with the words {}",
    ),
    "notice": (
        "A metal plate on a garden gate engraved with {}",
        "A sheet of paper taped to a door that says {}",
        "A yellow warning sign on a wall that reads {}",
        "A chalkboard outside a cafe that says {}",
        "A laminated notice in a stairwell that reads {}",
        "A hanging sign in a shop window that says {}",
        "A stencilled text on a concrete floor that reads {}",
    ),
    "number": (
        "A railway station with a blue sign that reads {}",
        "A brass plate on a corridor wall that says {}",
        "An illuminated display in a hall that shows {}",
        "A road sign beside a field that reads {}",
        "A painted pillar in a car park with the words {}",
        "A ticket held between two fingers, printed with {}",
    ),
}
# How the picture was taken or made; empty as often as not. Their number is a prime.
_DETAILS = _words(
    """at dusk, close up, photographed at noon, in soft morning light, as a watercolor, in black and
white, with a blurred background, in warm evening light"""
)
DETAILS = [""] + [text for detail in _DETAILS for text in (f", {detail}", "")]

# What objects.jsonl asks for: classes and colours that detectors trained on COCO know
# --------------------------------------------------------------------------------------------------

OBJECTS = {
    "apple": "apples",
    "backpack": "backpacks",
    "bench": "benches",
    "bicycle": "bicycles",
    "book": "books",
    "bottle": "bottles",
    "bowl": "bowls",
    "cat": "cats",
    "chair": "chairs",
    "clock": "clocks",
    "cow": "cows",
    "cup": "cups",
    "dog": "dogs",
    "elephant": "elephants",
    "horse": "horses",
    "kite": "kites",
    "orange": "oranges",
    "sheep": "sheep",
    "suitcase": "suitcases",
    "train": "trains",
    "umbrella": "umbrellas",
    "vase": "vases",
    "wine glass": "wine glasses",
    "zebra": "zebras",
}
COUNTS = {2: "two", 3: "three", 4: "four"}
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
SIDES = ("left of", "right of", "above", "below")

# Kinds of scenes.jsonl
# --------------------------------------------------------------------------------------------------

SCENE_WORDS = {
    "animal": ("badger", "heron", "otter", "tortoise", "goat"),
    "thing": ("teapot", "ladder", "lantern", "typewriter", "wheelbarrow"),
    "color": ("teal", "crimson", "mustard yellow", "lilac"),
    "odd": ("blue", "transparent", "square", "knitted"),
    "number": ("Two", "Three", "Four", "Five"),
    "place": ("in a desert", "on a frozen lake", "in an empty theatre", "on a roof at night"),
    "style": ("an oil painting", "a pencil sketch", "a linocut", "a long-exposure photograph"),
    "time": ("at sunrise", "during a storm", "under street lamps", "in thick fog"),
    "material": ("glass", "moss", "folded paper", "rusty iron"),
    "rare": ("sextant", "theremin", "samovar", "metronome", "gramophone"),
}
SCENES = {
    "colors": ["A {color} {thing} beside a {animal}", "A {odd} banana on a white plate"],
    "counting": ["{number} {animal}s {place}", "{number} {color} candles on a wooden table"],
    "conflicting": ["A {animal} reading a newspaper {place}", "A {thing} made of {material}"],
    "descriptions": [
        "A street market {time}, with wet cobblestones and a single {color} awning",
        "A kitchen {time}: a {thing} on the stove, steam on the window and a {animal} asleep",
    ],
    "positions": [
        "A {thing} on top of a stack of books, and a {animal} behind it",
        "A {animal} to the left of a {color} {thing}",
    ],
    "rare": ["A {rare} on a velvet cushion", "A person playing a {rare} {place}"],
    "style": ["A {animal} {place}, as {style}", "A {thing} {time}, as {style}"],
    "text": ['A {thing} with a label that says "{color}"', 'A sign {place} that reads "{animal}"'],
}
