"""One ReAct demonstration per benchmark, written for this project: thought, action, observation."""

ALFWORLD = """\
Your task: put a clean spoon in drawer.
Observation: You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a \
countertop 1, a diningtable 1, a drawer 1, a fridge 1, and a sinkbasin 1.
<think>I need a spoon, then a sinkbasin to clean it, then a drawer. I have not seen a spoon yet. \
It may be on the table.</think>
<action>go to diningtable 1</action>
Observation: You arrive at diningtable 1. On the diningtable 1, you see a cup 1, and a plate 2.
<think>There is no spoon here. The countertop is the next likely place.</think>
<action>go to countertop 1</action>
Observation: You arrive at countertop 1. On the countertop 1, you see a knife 1, and a spoon 3.
<think>I have found spoon 3. I take it, and clean it before I put it away.</think>
<action>take spoon 3 from countertop 1</action>
Observation: You pick up the spoon 3 from the countertop 1.
<think>I hold spoon 3, which is not clean yet. I need the sinkbasin.</think>
<action>go to sinkbasin 1</action>
Observation: You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.
<think>I am at the sinkbasin with the spoon in my hand.</think>
<action>clean spoon 3 with sinkbasin 1</action>
Observation: You clean the spoon 3 using the sinkbasin 1.
<think>The spoon is clean. What is left is to put it in the drawer.</think>
<action>go to drawer 1</action>
Observation: You arrive at drawer 1. The drawer 1 is closed.
<think>I have to open the drawer first.</think>
<action>open drawer 1</action>
Observation: You open the drawer 1. The drawer 1 is open. In it, you see nothing.
<think>The drawer is open. Putting the clean spoon there solves the task.</think>
<action>move spoon 3 to drawer 1</action>"""

WEBSHOP = """\
Your task: Find me insulated, leak proof water bottles with color: green, and size: 32 ounce, and \
price lower than 30.00 dollars
Observation: 'Search'
<think>I search for the kind of product with its two features. Color, size and price can be \
checked on the pages.</think>
<action>search[insulated leak proof water bottle green 32 ounce]</action>
Observation: 'Back to Search' [SEP] 'Page 1 (Total results: 3)' [SEP] 'Next >' [SEP] 'B0A1QX7T2M' \
[SEP] 'TERVANO Steel Lunch Box' [SEP] '$24.00' [SEP] 'B0C4MW9K5R' [SEP] 'OLMIRA Insulated Leak \
Proof Water Bottle' [SEP] '$27.50' [SEP] 'B0D8PZ3H6V' [SEP] 'NORVEK Insulated Water Bottle' [SEP] \
'$41.00'
<think>The first is no bottle, and the third costs more than 30 dollars. The second has both \
features and costs 27.50 dollars.</think>
<action>click[b0c4mw9k5r]</action>
Observation: 'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'black' [SEP] 'green' [SEP] \
'size' [SEP] '18 ounce' [SEP] '32 ounce' [SEP] 'OLMIRA Insulated Leak Proof Water Bottle' [SEP] \
'Price: $27.50' [SEP] 'Rating: N.A.' [SEP] 'Description' [SEP] 'Features' [SEP] 'Reviews' [SEP] \
'Buy Now'
<think>Green and 32 ounce are both there. I choose the color first.</think>
<action>click[green]</action>
Observation: 'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'black' [SEP] 'green' [SEP] \
'size' [SEP] '18 ounce' [SEP] '32 ounce' [SEP] 'OLMIRA Insulated Leak Proof Water Bottle' [SEP] \
'Price: $27.50' [SEP] 'Rating: N.A.' [SEP] 'Description' [SEP] 'Features' [SEP] 'Reviews' [SEP] \
'Buy Now'
<think>Green is chosen. The page does not change, so I go on with the size.</think>
<action>click[32 ounce]</action>
Observation: 'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'black' [SEP] 'green' [SEP] \
'size' [SEP] '18 ounce' [SEP] '32 ounce' [SEP] 'OLMIRA Insulated Leak Proof Water Bottle' [SEP] \
'Price: $27.50' [SEP] 'Rating: N.A.' [SEP] 'Description' [SEP] 'Features' [SEP] 'Reviews' [SEP] \
'Buy Now'
<think>Color and size are chosen, and the price is below 30 dollars. I buy it.</think>
<action>click[buy now]</action>"""

SEARCH = """\
Your task: In which country was the architect of the Sydney Opera House born?
Observation: In which country was the architect of the Sydney Opera House born?
<think>I need the architect first, and then the place of birth. I search for the architect.</think>
<search>architect of the Sydney Opera House</search>
Observation: <information>{"result": "Doc 1: \\"Sydney Opera House\\"\\nThe Sydney Opera House is \
a performing arts center in Sydney. It was designed by J\\u00f8rn Utzon and opened in \
1973.\\n"}</information>
<think>The architect is Jorn Utzon. The passage does not say where he was born.</think>
<search>Jorn Utzon place of birth</search>
Observation: <information>{"result": "Doc 1: \\"J\\u00f8rn Utzon\\"\\nJ\\u00f8rn Utzon was an \
architect. He was born in Copenhagen and grew up in Aalborg.\\n"}</information>
<think>He was born in Copenhagen, which is in Denmark.</think>
<answer>Denmark</answer>"""

EXAMPLES = {"alfworld": ALFWORLD, "webshop": WEBSHOP, "search": SEARCH}
