/* task_text.c - see task_text.h. */
#include "client/tasks/task_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- choices ---- */

/* SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 16). */
uint64_t task_text_random(struct task_text_random *random)
{
    uint64_t z = random->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

size_t task_text_below(struct task_text_random *random, size_t n)
{
    return (size_t)(task_text_random(random) % n); /* n is tiny beside 2^64: no bias that could matter */
}

size_t *task_text_order(struct task_text_random *random, size_t n)
{
    size_t *order = malloc((n + 1) * sizeof(*order));
    for (size_t i = 0; order && i < n; i++) {
        size_t k = task_text_below(random, i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    return order;
}

void task_text_places(struct task_text_random *random, size_t n, size_t k, size_t *ret_places)
{
    for (size_t i = 0; i < k; i++) {
        size_t place = task_text_below(random, n + 1), at = i;
        for (; at > 0 && ret_places[at - 1] > place; at--)
            ret_places[at] = ret_places[at - 1];
        ret_places[at] = place;
    }
}

/* ---- a text ---- */

static bool reserve(struct task_text *text, size_t n_more)
{
    if (text->n_bytes + n_more < text->size)
        return true;
    size_t size = 2 * (text->n_bytes + n_more) + 256;
    char *grown = text->no_memory ? NULL : realloc(text->bytes, size);
    if (!grown) {
        text->no_memory = true;
        return false;
    }
    text->bytes = grown;
    text->size = size;
    return true;
}

void task_text_add(struct task_text *text, const char *format, ...)
{
    char words[512];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    size_t n_bytes = n < 0 ? 0 : (size_t)n < sizeof(words) ? (size_t)n : sizeof(words) - 1;
    if (!reserve(text, n_bytes))
        return;
    memcpy(text->bytes + text->n_bytes, words, n_bytes + 1);
    text->n_bytes += n_bytes;
}

/* ---- words ---- */

static const char *const words[] = {
    "apple",     "river",       "stone",      "garden",      "window",    "silver",      "market",    "forest",
    "bridge",    "candle",      "mirror",     "basket",      "hammer",    "planet",      "rocket",    "violin",
    "carpet",    "pencil",      "turtle",     "dragon",      "castle",    "island",      "valley",    "harbor",
    "meadow",    "tunnel",      "ladder",     "button",      "pillow",    "saddle",      "anchor",    "barrel",
    "copper",    "walnut",      "pepper",     "tomato",      "rabbit",    "falcon",      "badger",    "otter",
    "salmon",    "beetle",      "spider",     "lizard",      "monkey",    "donkey",      "camel",     "zebra",
    "panther",   "lemon",       "cherry",     "melon",       "peach",     "olive",       "ginger",    "butter",
    "cookie",    "kettle",      "bottle",     "curtain",     "blanket",   "jacket",      "helmet",    "feather",
    "ribbon",    "needle",      "thread",     "marble",      "crystal",   "diamond",     "temple",    "palace",
    "cottage",   "kitchen",     "cellar",     "attic",       "engine",    "wagon",       "canoe",     "ferry",
    "paddle",    "compass",     "lantern",    "torch",       "cloud",     "storm",       "thunder",   "winter",
    "summer",    "autumn",      "spring",     "morning",     "evening",   "shadow",      "desert",    "ocean",
    "mountain",  "canyon",      "glacier",    "volcano",     "waterfall", "pebble",      "pasture",   "orchard",
    "vineyard",  "village",     "city",       "capital",     "border",    "highway",     "station",   "airport",
    "theater",   "museum",      "library",    "school",      "hospital",  "factory",     "office",    "tower",
    "chapel",    "statue",      "fountain",   "bench",       "staircase", "balcony",     "chimney",   "doorway",
    "hallway",   "bedroom",     "cabinet",    "drawer",      "cushion",   "mattress",    "shelf",     "table",
    "chair",     "sofa",        "lamp",       "clock",       "radio",     "piano",       "guitar",    "trumpet",
    "drum",      "flute",       "banjo",      "camera",      "picture",   "poster",      "calendar",  "notebook",
    "letter",    "envelope",    "stamp",      "parcel",      "package",   "ticket",      "passport",  "suitcase",
    "umbrella",  "wallet",      "purse",      "coin",        "medal",     "trophy",      "crown",     "sword",
    "shield",    "arrow",       "cannon",     "armor",       "banner",    "flag",        "whistle",   "rope",
    "chain",     "wire",        "cable",      "hook",        "nail",      "screw",       "wrench",    "shovel",
    "rake",      "broom",       "bucket",     "sponge",      "towel",     "soap",        "brush",     "comb",
    "razor",     "scissors",    "glove",      "mitten",      "scarf",     "sweater",     "shirt",     "trousers",
    "skirt",     "sandal",      "boot",       "slipper",     "sock",      "collar",      "pocket",    "sleeve",
    "zipper",    "buckle",      "leather",    "cotton",      "velvet",    "linen",       "denim",     "wool",
    "silk",      "paper",       "cardboard",  "plastic",     "rubber",    "metal",       "iron",      "steel",
    "bronze",    "gold",        "platinum",   "brick",       "concrete",  "cement",      "gravel",    "sand",
    "clay",      "mud",         "dust",       "smoke",       "flame",     "ember",       "ash",       "coal",
    "diesel",    "petrol",      "battery",    "magnet",      "lens",      "prism",       "laser",     "robot",
    "computer",  "keyboard",    "monitor",    "printer",     "screen",    "speaker",     "telephone", "antenna",
    "satellite", "telescope",   "microscope", "thermometer", "ruler",     "scale",       "balance",   "wheel",
    "axle",      "pedal",       "brake",      "mast",        "sail",      "rudder",      "deck",      "cabin",
    "bakery",    "butcher",     "grocer",     "tailor",      "painter",   "sculptor",    "dancer",    "singer",
    "actor",     "author",      "editor",     "lawyer",      "doctor",    "nurse",       "dentist",   "teacher",
    "student",   "farmer",      "miner",      "sailor",      "soldier",   "captain",     "general",   "king",
    "queen",     "prince",      "knight",     "wizard",      "giant",     "dwarf",       "pirate",    "pilot",
    "driver",    "plumber",     "carpenter",  "gardener",    "banker",    "merchant",    "waiter",    "janitor",
    "detective", "inspector",   "judge",      "witness",     "guest",     "neighbor",    "cousin",    "uncle",
    "nephew",    "grandmother", "infant",     "pilgrim",     "hermit",    "eagle",       "hawk",      "raven",
    "sparrow",   "robin",       "pigeon",     "parrot",      "penguin",   "ostrich",     "pelican",   "swan",
    "goose",     "duck",        "chicken",    "turkey",      "peacock",   "lion",        "tiger",     "leopard",
    "cheetah",   "wolf",        "fox",        "bear",        "moose",     "deer",        "squirrel",  "hedgehog",
    "mouse",     "hamster",     "beaver",     "walrus",      "seal",      "dolphin",     "whale",     "shark",
    "octopus",   "lobster",     "crab",       "shrimp",      "oyster",    "snail",       "worm",      "ant",
    "bee",       "wasp",        "moth",       "butterfly",   "cricket",   "grasshopper", "frog",      "toad",
    "snake",     "crocodile",   "goat",       "sheep",       "cow",       "bull",        "horse",     "pony",
    "mule",      "elephant",    "giraffe",    "rhino",       "hippo",     "kangaroo",    "koala",     "panda",
    "sloth",     "oak",         "maple",      "birch",       "willow",    "cedar",       "pine",      "bamboo",
    "cactus",    "fern",        "moss",       "ivy",         "rose",      "tulip",       "daisy",     "lily",
    "orchid",    "violet",      "sunflower",  "clover",      "wheat",     "barley",      "corn",      "rice",
    "potato",    "carrot",      "onion",      "garlic",      "cabbage",   "lettuce",     "spinach",   "celery",
    "radish",    "turnip",      "pumpkin",    "cucumber",    "eggplant",  "mushroom",    "bean",      "pea",
    "lentil",    "banana",      "mango",      "papaya",      "grape",     "plum",        "apricot",   "fig",
    "coconut",   "pineapple",   "strawberry", "raspberry",   "blueberry", "almond",      "cashew",    "peanut",
    "hazelnut",  "bread",       "toast",      "pancake",     "waffle",    "biscuit",     "muffin",    "pie",
    "pudding",   "candy",       "chocolate",  "honey",       "syrup",     "sugar",       "salt",      "vinegar",
    "mustard",   "cheese",      "yogurt",     "cream",       "soup",      "stew",        "salad",     "sandwich",
    "sausage",   "bacon",       "steak",      "noodle",      "dumpling",  "coffee",      "tea",       "juice",
    "soda",      "cider",
};

#define N_WORDS (sizeof(words) / sizeof(words[0]))

size_t task_text_n_words(void)
{
    return N_WORDS;
}

const char *task_text_word(size_t i)
{
    return words[i];
}

void task_text_key(size_t i, char ret_key[TASK_TEXT_KEY_SIZE])
{
    if (i < N_WORDS) {
        snprintf(ret_key, TASK_TEXT_KEY_SIZE, "%s", words[i]);
        return;
    }
    /* The second word is as far behind the first as the round is long: no pair comes twice before all have come. */
    size_t round = i / N_WORDS, first = i % N_WORDS;
    snprintf(ret_key, TASK_TEXT_KEY_SIZE, "%s-%s", words[first], words[(first + round) % N_WORDS]);
}

const char *task_text_filler(size_t i)
{
    static const char *const sentences[] = {
        "The sun went down behind the hills and the road was quiet.",
        "People came and went, and nobody was in a hurry.",
        "Rain fell in the morning, and by noon the streets were dry again.",
        "A dog slept in front of the door of the shop.",
        "The train was late, as it was every day of that week.",
    };
    return sentences[i % (sizeof(sentences) / sizeof(sentences[0]))];
}
