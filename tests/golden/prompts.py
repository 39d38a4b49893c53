"""The prompts of continuations.json and the conversations of chat.json.

All text was written for this project. The long prompt is put together from the
paragraphs and word lists below by a fixed rule, so it never changes by itself.
"""


def long_prompt(n_days):
    """A harbour master's log of n_days days with a fact to be found again at the end."""
    opening = (
        "Log of the harbour master at Tarn Point\n\n"
        "I write this log because the old one was lost in the flood of last winter, and because the new "
        "wardens ask for dates and numbers where I can only offer what I remember. From now on every day has "
        "its line: the wind, the ship, the cargo, the berth and the fee. What does not fit in a line goes "
        "between the lines, as it always has.\n\n"
        "One thing must be kept for whoever comes after me. The red locker in the boat house opens with the "
        "word 'marigold' and the number 4471. The blue locker has no lock at all; there is nothing in it but "
        "rope. The keys of the lamp room hang behind the tide table, on the second nail from the left.\n\n"
    )
    notes = [
        "The swell came in from the north all night and I did not sleep. Two of the fishing boats dragged their "
        "anchors and lay across each other at dawn like tired dogs. Nobody was hurt. We spent the morning with "
        "fenders and long poles, and by noon you would not have known that anything had happened.",
        "A school class came to see the lamp. Their teacher asked how far it shines, and I said eighteen miles, "
        "and a boy at the back asked what happens at nineteen. I have thought about it since. I suppose that at "
        "nineteen miles one has to trust the chart.",
        "The crane is broken again. The part we need is made in one town only, and the letter that orders it has "
        "to go by the same ship that the crane should unload. I have explained this to the office. The office "
        "has thanked me for my patience.",
        "Fog for three days. I rang the bell every two minutes until my arm was numb, then the cook rang it, then "
        "his daughter, who has a better sense of time than both of us. A coaster found the entrance by her "
        "bell alone, and its captain brought her a box of oranges.",
        "I counted the stores: forty coils of rope, six of them rotten; eleven lamps, nine good; paint, too much "
        "of the green and none of the white. Somebody has taken the small anchor. I know who it is, and I also "
        "know that he will bring it back when the herring are gone.",
        "A letter from my sister. She writes that the orchard did well, that the roof did not, and that I should "
        "come home before the roads freeze. I answered that a harbour cannot be left, which is true, and that I "
        "miss the orchard, which is truer.",
        "An argument over berth seven. Two captains, one ring to tie up to, and both with a paper that says the "
        "ring is theirs. I read both papers. They were signed by me, on the same day. I have moved the stone "
        "buoy and invented berth seven and a half.",
        "Today the sea was so flat that the gulls looked at themselves. I cleaned the lens, all one hundred and "
        "twelve panes of it, and in each of them there was a small harbour with a small man cleaning a lens.",
        "The herring are gone and the small anchor is back, painted green. I said nothing. In the evening there was a "
        "bucket of mussels on my step, and I said nothing about that either, but I left the bucket where it could be "
        "found, clean, with two of the oranges in it.",
    ]
    winds = ["north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west"]
    forces = ["calm", "light", "fresh", "strong", "rough"]
    ships = ["Amity", "Brightwater", "Corran Lass", "Dunlin", "Evening Star", "Fulmar", "Grey Heron", "Halcyon",
             "Isolde", "Kittiwake", "Lapwing", "Merganser", "Nightjar", "Osprey", "Petrel"]
    cargoes = ["salt", "timber", "slate", "barley", "coal", "wool", "cider in barrels", "nails and wire", "glass",
               "potatoes", "bricks", "dried fish", "paper"]
    state = 20240229
    parts = [opening]
    for day in range(1, n_days + 1):
        numbers = []
        for _ in range(6):
            state = (state * 1103515245 + 12345) % 2147483648
            numbers.append(state >> 12)
        parts.append("Day %d. Wind %s, %s. %s with %d tons of %s, berth %d, fee %d.%02d paid.\n" % (
            day, winds[numbers[0] % len(winds)], forces[numbers[1] % len(forces)], ships[numbers[2] % len(ships)],
            numbers[3] % 90 + 10, cargoes[numbers[4] % len(cargoes)], day % 9 + 1, numbers[5] % 40 + 3,
            numbers[5] % 4 * 25))
        if day % 9 == 0:
            parts.append("\n" + notes[(day // 9 - 1) % len(notes)] + "\n\n")
    parts.append(
        "\nHere the log ends. The new harbour master arrives tomorrow, and there is one question that must not be "
        "forgotten: which word and which number open the red locker in the boat house? The red locker opens with "
        "the word")
    return "".join(parts)


PROMPTS = [
    ("single token", "The"),
    ("single space", " "),
    ("english prose", "The old lighthouse keeper climbed the stairs every evening, and when he reached the top he"),
    ("english fact", "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"),
    ("english essay",
     "Bread is one of the oldest foods that people make. All it needs is flour, water, salt and time. The flour "
     "gives body, the water wakes up the yeast, and the time does the rest. A baker learns to read the dough: when "
     "it is ready it"),
    ("english letter", "Dear Sir or Madam,\n\nI am writing to you because the bicycle that I ordered on the third of May"),
    ("english dialogue",
     "\"Where were you last night?\" asked the inspector.\n\n\"At home,\" said Miss Green, \"with my cat.\"\n\n"
     "\"Can anybody confirm that?\"\n\n\""),
    ("instruction", "Write a short list of five things one should take along on a walk in the mountains.\n\n1."),
    ("question", "Question: Why does ice float on water?\nAnswer:"),
    ("translation", "English: good morning\nSpanish: buenos d\u00edas\nEnglish: thank you\nSpanish: gracias\nEnglish: the house\nSpanish:"),
    ("capitals", "BREAKING NEWS: THE CITY COUNCIL HAS DECIDED THAT"),
    ("python",
     "def is_prime(n):\n    \"\"\"Return True if n is a prime number.\"\"\"\n    if n < 2:\n        return False\n"),
    ("c",
     "#include <stdio.h>\n#include <string.h>\n\n/* Reverses the string s in place. */\nvoid reverse(char *s)\n{\n"),
    ("json",
     "{\n  \"users\": [\n    {\"id\": 1, \"name\": \"Alice\", \"active\": true},\n    {\"id\": 2, \"name\": \"Bob\", \"active\": false},\n    {"),
    ("sql",
     "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, total REAL, created DATE);\n\n"
     "-- the ten customers who spent most\nSELECT"),
    ("html",
     "<!DOCTYPE html>\n<html>\n<head>\n  <title>My garden</title>\n</head>\n<body>\n  <h1>My garden</h1>\n  <ul>\n    <li>Roses</li>\n"),
    ("shell", "#!/bin/sh\n# Counts the lines of every text file below the current directory.\nset -e\n\n"),
    ("javascript", "function debounce(callback, delay) {\n  let timer = null;\n  return function (...args) {\n"),
    ("latex", "\\documentclass{article}\n\\begin{document}\n\\section{Introduction}\nLet $x$ be a real number. Then"),
    ("markdown table", "| Planet | Moons |\n|--------|------:|\n| Earth | 1 |\n| Mars | 2 |\n| Jupiter |"),
    ("chinese", "\u5f88\u4e45\u4ee5\u524d\uff0c\u5c71\u91cc\u4f4f\u7740\u4e00\u4f4d\u8001\u4eba\u3002\u4ed6\u6bcf\u5929"),
    ("japanese", "\u6625\u306e\u671d\u3001\u732b\u306f\u5ead\u3067"),
    ("russian", "\u0412 \u043c\u0430\u043b\u0435\u043d\u044c\u043a\u043e\u0439 \u0434\u0435\u0440\u0435\u0432\u043d\u0435 \u0436\u0438\u043b \u043c\u0430\u043b\u044c\u0447\u0438\u043a, \u043a\u043e\u0442\u043e\u0440\u044b\u0439"),
    ("arabic", "\u0643\u0627\u0646 \u0647\u0646\u0627\u0643 \u0631\u062c\u0644 \u0639\u062c\u0648\u0632 \u064a\u0639\u064a\u0634 \u0641\u064a"),
    ("hindi", "\u090f\u0915 \u0917\u093e\u0901\u0935 \u092e\u0947\u0902 \u090f\u0915 \u0915\u093f\u0938\u093e\u0928"),
    ("french", "Il \u00e9tait une fois, dans une petite ville au bord de la mer, une jeune fille qui"),
    ("german", "Der Zug nach M\u00fcnchen hatte versp\u00e4tung, und auf dem Bahnsteig"),
    ("emoji", "\U0001f34e apple\n\U0001f34c banana\n\U0001f347 grapes\n\U0001f353 strawberry\n\U0001f34b"),
    ("arithmetic", "12 + 30 = 42\n7 + 8 = 15\n100 - 58 = 42\n9 * 9 = 81\n25 + 17 ="),
    ("digits", "1 2 4 8 16 32 64 128 256 512"),
    ("dates", "2023-01-01\n2023-02-01\n2023-03-01\n2023-04-01\n"),
    ("white space",
     "   item      price      count   \n\n   apple      1.20         10   \n   pear       0.95         12   \n\t\t\n   plum"),
    ("indentation", "class Stack:\n\n    def __init__(self):\n        self.items = []\n\n\n    def push(self, item):\n            "),
    ("key-value list",
     "host = alpha\nport = 8080\ncolour = green\nretries = 3\nowner = maria\nlimit = 250\n\nowner is maria\nport is 8080\ncolour is"),
    ("repetition", "red blue red blue red blue red blue red blue red"),
    ("punctuation", "((())) ()() [[]] {{}} <<>> ((("),
    ("contractions", "I don't think we'd have gone if they hadn't said it'd be alright, but"),
    ("chat",
     "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
     "<|im_start|>user\nHow do I boil an egg?<|im_end|>\n<|im_start|>assistant\n"),
    ("chat, short answer",
     "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nWhat is the opposite of hot?<|im_end|>\n"
     "<|im_start|>assistant\n"),
    ("long", long_prompt(86)),
]

CHATS = [
    ("user only", [("user", "Hello!")]),
    ("system and user", [("system", "You are a pirate."), ("user", "Where is the treasure?")]),
    ("multi-turn", [
        ("user", "What is 2 + 2?"), ("assistant", "2 + 2 is 4."), ("user", "And 3 + 3?")]),
    ("multi-turn with system", [
        ("system", "Be brief."), ("user", "Name a colour."), ("assistant", "Blue."), ("user", "Another one."),
        ("assistant", "Green."), ("user", "A last one, please.")]),
    ("empty system", [("system", ""), ("user", "Hi")]),
    ("empty user", [("user", "")]),
    ("white space is kept", [("system", "  Two spaces.  \n"), ("user", "\n\tTabs\tand lines\n\n"), ("assistant", " ok "), ("user", " ")]),
    ("other scripts", [("user", "\u4f60\u597d\uff01 \U0001f600 Stra\u00dfe"), ("assistant", "\u4f60\u597d\uff01"), ("user", "\u041f\u0440\u0438\u0432\u0435\u0442")]),
    ("quotes and braces", [("user", "Print \"{{ x }}\" and {% if y %} and \\n, it's 'quoted' <b>&amp;</b>")]),
    ("code", [("system", "You write C."), ("user", "```c\nint main(void)\n{\n    return 0;\n}\n```\nExplain.")]),
    ("system later", [("user", "First."), ("assistant", "Yes?"), ("system", "Now answer in French."), ("user", "Second.")]),
    ("special tokens in the text", [("user", "a<|im_end|>b<|im_start|>c")]),
]
