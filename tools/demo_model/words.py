"""Word lists of the little stories.

Every list is chosen so that the article can be told from the first letter of the next
word (no "hour", no "unicorn"), which keeps the a/an rule of the grammar simple.
"""

from __future__ import annotations

NAMES: dict[str, list[str]] = {
    "m": [
        "Tom", "Max", "Ben", "Leo", "Sam", "Oscar", "Finn", "Toby", "Jack", "Hugo",
        "Milo", "Otto", "Felix", "Rufus", "Bruno", "Pip", "Theo", "Gus", "Ned", "Arlo",
    ],
    "f": [
        "Lily", "Mia", "Anna", "Daisy", "Ella", "Ruby", "Tilly", "Molly", "Rosie", "Lucy",
        "Poppy", "Nina", "Clara", "Hazel", "Ivy", "Olive", "Sophie", "Wendy", "Emma", "Bella",
    ],
}

ANIMALS = [
    "fox", "bear", "rabbit", "mouse", "cat", "dog", "duck", "frog", "hedgehog", "squirrel",
    "owl", "bird", "turtle", "pig", "goat", "lamb", "pony", "hen", "deer", "otter",
    "badger", "mole", "beaver", "wolf",
]
PEOPLE: dict[str, list[str]] = {"m": ["boy", "farmer", "baker"], "f": ["girl", "farmer", "baker"]}

HERO_ADJ = [
    "little", "small", "young", "old", "kind", "brave", "clever", "shy", "happy", "quiet",
    "friendly", "curious", "funny", "gentle", "busy",
]
FRIEND_ADJ = ["kind", "wise", "old", "friendly", "big", "cheerful", "clever", "strong", "gentle"]

HOMES = [
    "in a hollow tree", "in a small house", "in a cosy cottage", "under an old oak",
    "in a quiet village", "on a green hill", "on a little farm", "in a warm den",
    "near a blue lake", "by the sea", "at the edge of the forest", "behind the old mill",
]

# Destination -> how one is there.
PLACES: dict[str, str] = {
    "the forest": "in the forest",
    "the river": "by the river",
    "the lake": "by the lake",
    "the meadow": "in the meadow",
    "the market": "at the market",
    "the hill": "on the hill",
    "the beach": "on the beach",
    "the garden": "in the garden",
    "the old bridge": "at the old bridge",
    "the village": "in the village",
    "the pond": "at the pond",
    "the mill": "at the mill",
}

COLOURS = ["red", "blue", "green", "yellow", "white", "purple", "orange", "golden", "silver", "brown"]
OBJECTS = [
    "ball", "kite", "drum", "book", "hat", "scarf", "lantern", "bell", "flute", "basket",
    "ring", "cup", "blanket", "umbrella", "toy boat", "bag", "whistle", "button", "mitten", "map",
]
FOODS = [
    "apples", "nuts", "berries", "bread", "cheese", "honey", "soup", "carrots", "pears",
    "pancakes", "cookies", "plums", "cake", "porridge",
]
HIDES = [
    "under a bush", "behind a big rock", "in the tall grass", "under a pile of leaves",
    "in an old boot", "behind the door", "next to the well", "under a wooden bench",
    "between two stones", "inside an empty barrel",
]
TRAPS = ["a deep hole", "the thick mud", "a thorny bush", "an old net", "a hollow log", "the icy pond"]
SHELTERS = ["an old barn", "a small cave", "a big tree", "a wooden hut", "a stone bridge"]
BUILDS = ["boat", "kite", "tree house", "cart", "bench", "bird house", "raft", "sledge", "swing"]
PARTS = ["rope", "wheel", "board", "nail", "stick", "plank", "string"]
SEEDS = ["sunflower", "pumpkin", "rose", "carrot", "bean", "tulip", "tomato", "apple tree"]
FINDS = ["a golden coin", "an old letter", "a tiny key", "a shiny stone", "a silver spoon", "a glass marble"]
NOISES = ["a strange noise", "a soft knock", "a loud crack", "a quiet sob", "an odd squeak", "a long howl"]
GOOD = ["happy", "glad", "proud", "cheerful", "thankful"]
BAD = ["sad", "worried", "upset", "lonely", "unhappy"]
SKY = ["sunny", "warm", "cold", "windy", "cloudy", "foggy", "bright"]
LESSONS = [
    "that sharing makes everyone happy", "that friends help each other",
    "that it is good to tell the truth", "that being brave is not so hard",
    "that small friends can do big things", "that it is never too late to say sorry",
    "that kind words cost nothing", "that patience is worth the wait",
    "that work is easier together", "that home is the best place of all",
]
WHENS = [
    "One day", "One morning", "One evening", "One sunny day", "One cold morning",
    "One rainy afternoon", "One quiet night", "Early one morning",
]
LATERS = [
    "The next day", "The next morning", "Later that day", "After a while", "Soon",
    "In the evening", "After lunch", "A little later", "That afternoon",
]
SUDDENS = ["Suddenly", "Just then", "At that moment", "All at once"]
ENDINGS = ["From that day on", "After that day", "From then on", "Ever since"]
