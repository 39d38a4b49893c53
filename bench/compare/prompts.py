"""Prompts of an exact number of tokens: sentences of ordinary English words in a fixed pseudo-random order."""

import random

WORDS = """
able about above across after again air along also always among animal answer apple arm around ask autumn back bag ball
bank basket beach bear beautiful because bed before begin behind below best better between big bird black blue board boat
body bone book both bottom box boy branch bread break bridge bright bring brother brown build burn but buy call calm can
candle car card care carry castle cat catch cause chair change cheap child choose church circle city clean clear climb
clock close cloud coat cold color come cook cool copper corner cotton count country cover cross cup cut dance dark day deep
desk dinner dog door down draw dream dress drink drive dry early earth east eat edge egg empty end engine enough evening
ever every eye face fact fall family far farm fast father feather field fill find fine finger fire first fish floor flower
fly follow food foot forest forget fork free fresh friend from front fruit full garden gate gather get girl give glass go
gold good grass gray great green ground group grow hair half hall hand happy hard hat head hear heart heavy help here high
hill hold hole home honest horse hot hour house hundred ice idea inside iron island join jump keep key kind king kitchen
knee knife know ladder lake lamp land large last late laugh lead leaf learn leave left leg letter light like line lion list
little long look lose loud love low machine make many map market master meal mean meat meet metal middle milk mind minute
money month moon more morning mother mountain mouth move music name narrow near neck need never new next night noise north
nose note now number ocean offer oil old once only open orange order other outside over page paint pair paper part pass
path pay pen people picture piece place plain plant plate play pocket point poor possible price print proud pull push quick
quiet rain reach read ready red remember rest rice rich ride right ring river road rock roof room root rose round row rule
run sail salt same sand save school sea season second see seed send seven shade shape sharp ship shoe shop short shoulder
side silver simple since sing sister sit size skin sky sleep slow small smile snow soft some song soon south space speak
spoon spring square stand star start station stay steel step stone stop store storm story straight strange street strong
sugar summer sun sure sweet swim table tail take talk tall teach tell ten thank thick thin thing think third time today
together tomorrow tool top town trade train travel tree true trust try turn under until use valley very village visit voice
wait walk wall want warm wash watch water wave way weather week well west wheel white wide wild wind window wing winter
wire wise wish with without wood word work world write yard year yellow yes young
""".split()


def sentences(n_words, seed):
    """n_words words as text: sentences of 6 to 14 of them. The same seed begins with the same words."""
    choice = random.Random(seed)
    words = []
    left = 0
    for _ in range(n_words):
        if left == 0:
            left = choice.randint(6, 14)
        left -= 1
        words.append(choice.choice(WORDS) + ("." if left == 0 else ""))
    return " ".join(words)


def of_tokens(n_tokens, seed, count):
    """Text of exactly n_tokens tokens, by count(text). Raises ValueError when the tokenizer allows none."""
    n_words = n_tokens
    for _ in range(40):
        text = sentences(n_words, seed)
        found = count(text)
        if found == n_tokens:
            return text
        if found > n_tokens:
            n_words -= max(1, (found - n_tokens) // 2)  # never past it: hardly a word has more than two tokens
        elif n_tokens - found > 2:
            n_words += (n_tokens - found) // 2
        elif count(text + " the") == found + 1:
            return text + " the" * (n_tokens - found)
        else:
            break
        if n_words < 1:
            break
    raise ValueError(f"no text of exactly {n_tokens} tokens was found")
