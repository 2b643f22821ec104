"""The sentences of the little stories: openings, plots as lists of beats, endings.

A beat is a list of templates of which one is written; a beat that may be left out begins
with the empty string.  One template is one sentence, so that the judge can split a text.
"""

from __future__ import annotations

from demo_model import words

Beat = list[str]

OPEN_NAMED: Beat = [
    "Once upon a time, there was {an} {aadj} {akind} named {A}.",
    "Once upon a time, {an} {aadj} {akind} named {A} lived {home}.",
    "Once upon a time, there lived {an} {aadj} {akind} called {A}.",
    "Once upon a time, {A} the {akind} lived {home}.",
    "Once there was {an} {aadj} {akind} named {A}.",
    "Long ago, {an} {aadj} {akind} named {A} lived {home}.",
    "Far away, there lived {an} {aadj} {akind} called {A}.",
    "{An} {akind} named {A} lived {home}.",
    "{An} {aadj} {akind} named {A} lived {home}.",
    "{A} was {an} {aadj} {akind}.",
    "{A} was {an} {aadj} {akind} who lived {home}.",
    "There was once {an} {aadj} {akind} named {A}.",
    "This is the story of {an} {aadj} {akind} named {A}.",
    "{A} the {akind} lived {home}.",
]
OPEN_UNNAMED: Beat = [
    "Once upon a time, there was {an} {aadj} {akind}.",
    "Once upon a time, {an} {aadj} {akind} lived {home}.",
    "{An} {aadj} {akind} lived {home}.",
    "The {aadj} {akind} lived {home}.",
    "The {aadj} {akind} woke up early and looked out of the window.",
    "{An} {akind} lived {home}.",
    "There was once {an} {aadj} {akind} who lived {home}.",
]
NAMING: Beat = [
    "{His} name was {A}.",
    "Everyone called {him} {A}.",
    "{His} friends called {him} {A}.",
]
OPEN_DAY: Beat = [
    "{when}, {an} {aadj} {akind} named {A} went to {place}.",
    "{when}, {A} the {akind} walked to {place}.",
    "{when}, {A} the {akind} woke up and felt {an} [little|tiny] bit bored.",
    "It was {an} {sky} day, and {A} the {akind} was {atplace}.",
    "It was {an} {sky} morning, and {A} the {akind} wanted to play.",
]
TRAIT: Beat = [
    "",
    "{A} lived {home}.",
    "{He} liked to [play|sing|walk|rest|dance] {atplace}.",
    "{He} loved to eat {food}.",
    "{A} loved {food} more than anything.",
    "{He} had a [good|dear|best] friend named {B}.",
    "{A} and {B} the {bkind} were [good|best|old] friends.",
    "Every [day|morning|evening], {he} walked to {place}.",
    "{He} was always [kind|polite|friendly] to [everyone|others].",
    "{A} had [a warm bed|a big heart|many dreams|a soft voice|a bright smile].",
]
START_DAY: Beat = [
    "{when}, {A} went to {place}.",
    "{when}, {he} walked to {place}.",
    "{when}, {A} was {atplace}.",
    "{when}, the [sun|sky] was bright, and {A} went out to play.",
    "{when}, {he} woke up and went to {place}.",
]
WEATHER: Beat = [
    "",
    "",
    "It was {an} {sky} day.",
    "The sun was shining and the birds were singing.",
    "The wind was blowing [softly|hard] in the trees.",
    "The air smelled of [flowers|rain|fresh bread|grass].",
    "The sky was [grey|blue|clear] and the grass was wet.",
]
MEET: Beat = [
    "{sudden}, {he} saw {B} the {bkind}.",
    "There {he} met {an} {badj} {bkind} named {B}.",
    "{later}, {an} {badj} {bkind} named {B} came along.",
    "{B} the {bkind} came [walking|running|hopping] down the path.",
    "On the way, {he} met {B}, {an} {badj} {bkind}.",
]
BTELL: Beat = [
    "\"[Hello|Good day|Hi], {A},\" said {B}.",
    "\"What is wrong?\" asked {B}.",
    "\"Why are you so {bad}?\" asked {B}.",
    "\"Can I help you?\" asked {B}.",
    "{B} asked, \"Why do you look so {bad}?\"",
]
THANKS: Beat = [
    "\"Thank you, {B}!\" said {A}.",
    "\"Thank you so much,\" said {A} with a [big|warm|happy] smile.",
    "{A} [hugged|thanked] {B} and [smiled|laughed].",
    "\"You are a [true|good|real] friend,\" said {A}.",
    "{A} was so {good} that {he} [danced|sang|jumped] for joy.",
]
REPLY: Beat = [
    "",
    "\"You are welcome,\" said {B}.",
    "\"That is what friends are for,\" said {B}.",
    "{B} smiled and [nodded|waved].",
    "\"I am always {good} to help,\" said {B}.",
]
CLOSE: Beat = [
    "{ending}, {A} and {B} were the best of friends.",
    "{ending}, they [met|played|laughed] together every day.",
    "{A} learned {lesson}.",
    "{A} and {B} learned {lesson}.",
    "{A} went home [tired|happy] and [slept well|dreamed of the stars].",
    "That night, {A} fell asleep with a smile.",
    "They [sat|rested] together [until the sun went down|under the stars|by the warm fire].",
    "And they all lived happily ever after.",
    "It was the best day of {his} life.",
    "{ending}, {A} never forgot {lesson}.",
]
LAST: Beat = ["", "", "", "", "The end."]

LOST: list[Beat] = [
    [
        "{He} had {an} {col} {obj} that {he} loved very much.",
        "{He} took {his} {col} {obj} with {him} [everywhere|wherever {he} went].",
        "{His} grandmother had given {him} {an} {col} {obj}.",
        "{A} was very proud of {his} new {col} {obj}.",
    ],
    [
        "But when {he} looked into {his} bag, the {obj} was gone.",
        "{sudden}, {he} saw that {his} {obj} was gone.",
        "{later}, {he} could not find {his} {obj}.",
        "But then {he} lost the {obj} {atplace}.",
    ],
    [
        "{A} was very {bad} and began to cry.",
        "{He} looked [everywhere|all day], but {he} could not find it.",
        "{A} felt {bad}.",
        "\"Oh no, where is my {obj}?\" cried {A}.",
    ],
    MEET,
    BTELL,
    [
        "\"I have lost my {col} {obj},\" said {A}.",
        "\"My {obj} is gone,\" said {A} with tears in {his} eyes.",
        "{A} told {B} about the lost {obj}.",
    ],
    [
        "\"Do not worry, we will find it,\" said {B}.",
        "\"Let us look for it together,\" said {B}.",
        "\"I will help you,\" said {B}.",
    ],
    [
        "They looked [here and there|high and low|near {otherplace}|all the way to {otherplace}].",
        "First they looked near {otherplace}, but it was not there.",
        "They searched for [a long time|two hours|the whole afternoon].",
    ],
    [
        "{later}, {B} found the {obj} {hide}.",
        "{sudden}, {B} saw something {col} {hide}.",
        "At last, they found the {col} {obj} {hide}.",
        "\"Look, here it is!\" cried {B}, and there was the {obj} {hide}.",
    ],
    THANKS,
    REPLY,
]

HUNGRY: list[Beat] = [
    [
        "{A} was very hungry, but there was nothing to eat at home.",
        "{His} [tummy|stomach] began to rumble.",
        "{He} wanted to eat {food}, but the [pot|plate|basket] was empty.",
    ],
    [
        "So {he} went to {place} to look for {food}.",
        "{He} looked for {food} near {otherplace}, but found nothing.",
        "{He} searched {atplace}, but there was no food at all.",
    ],
    [
        "{A} was tired and {bad}.",
        "{He} sat down on a stone and sighed.",
        "\"I am so hungry,\" said {A}.",
    ],
    MEET,
    BTELL,
    [
        "\"I am hungry and I have nothing to eat,\" said {A}.",
        "\"I would love some {food},\" said {A} shyly.",
        "{A} told {B} that {he} had not eaten all day.",
    ],
    [
        "{B} had a basket full of {food}.",
        "{B} opened {bhis} bag and took out some {food}.",
        "\"I have plenty of {food} at home, come with me,\" said {B}.",
    ],
    [
        "{B} shared the {food} with {A}.",
        "They sat down {atplace} and ate the {food} together.",
        "They ate until they were full.",
    ],
    THANKS,
    REPLY,
    [
        "",
        "{later}, {A} brought {B} some {food} too.",
        "The next time, {A} shared {his} {food} with {B}.",
    ],
]

STUCK: list[Beat] = [
    [
        "{sudden}, {he} heard {noise}.",
        "{sudden}, {he} heard someone call for help.",
        "On the way, {he} heard a [small|weak|scared] voice.",
    ],
    [
        "{B} the {bkind} was stuck in {trap}.",
        "It was {B}, {an} {badj} {bkind}, who was stuck in {trap}.",
        "{An} {badj} {bkind} named {B} was stuck in {trap}.",
    ],
    [
        "\"Help me, please!\" cried {B}.",
        "\"Please help me, I cannot get out,\" said {B}.",
        "{B} was scared and cold.",
    ],
    [
        "\"Do not be afraid, I will help you,\" said {A}.",
        "{A} wanted to help at once.",
        "{A} was afraid too, but {he} did not run away.",
    ],
    [
        "{He} found a long [rope|stick|branch] and held it out to {B}.",
        "First {he} pulled with all {his} might, but nothing happened.",
        "{He} ran home and came back with a strong rope.",
        "{He} thought for a moment and had a good idea.",
    ],
    [
        "{A} pulled and pulled, and at last {B} was free.",
        "They pulled together, and all at once {B} was free.",
        "{later}, {B} was free and safe.",
    ],
    [
        "\"Thank you, {A}, you saved me!\" said {B}.",
        "{B} hugged {A} and cried with joy.",
        "\"You are very brave,\" said {B}.",
        "\"How can I ever thank you?\" asked {B}.",
    ],
    [
        "\"I was {good} to help,\" said {A}.",
        "{A} smiled and felt {good}.",
        "\"Come home with me and have some {food},\" said {A}.",
    ],
]

BUILD: list[Beat] = [
    [
        "{A} wanted to build {an} {col} {build}.",
        "{He} had a plan to build a {build}.",
        "\"Today I will build a {build},\" said {A}.",
    ],
    [
        "{He} worked [all day|all morning|very hard], but the {part} was broken.",
        "{He} found some wood, but there was no {part}.",
        "{He} tried and tried, but the {build} [fell apart|would not hold|broke in two].",
    ],
    [
        "{A} was {bad} and wanted to give up.",
        "\"This is too hard for me,\" said {A}.",
        "{He} kicked a stone and sat down.",
    ],
    MEET,
    BTELL,
    [
        "\"I want to build a {build}, but I need a {part},\" said {A}.",
        "\"My {build} is broken,\" said {A}.",
        "{A} showed {B} the broken {build}.",
    ],
    [
        "\"We can do it together,\" said {B}.",
        "\"I have a {part} at home,\" said {B}.",
        "{B} had an old {part} and gave it to {A}.",
    ],
    [
        "They worked side by side [until the evening|all afternoon|with great care].",
        "{A} held the {part}, and {B} used the hammer.",
        "They sang a song while they worked.",
    ],
    [
        "{later}, the {build} was ready.",
        "At last, the {build} was done, and it looked [great|wonderful|very fine].",
        "They painted the {build} {col}.",
    ],
    THANKS,
    REPLY,
]

STORM: list[Beat] = [
    [
        "{sudden}, dark clouds came up and it began to rain.",
        "{sudden}, a big storm began.",
        "{later}, it began to snow, and the path was gone.",
    ],
    [
        "{A} was far from home and all wet.",
        "The wind was so strong that {A} could not walk.",
        "{He} did not know the way home.",
        "{A} was cold and {bad}.",
    ],
    [
        "{He} ran to {shelter} and hid there.",
        "{He} saw {shelter} and ran to it.",
        "{later}, {he} found {shelter}.",
    ],
    [
        "{B} the {bkind} was already there.",
        "Inside, {he} met {an} {badj} {bkind} named {B}.",
        "There sat {B}, {an} {badj} {bkind}.",
    ],
    [
        "\"Come in, there is room for two,\" said {B}.",
        "\"You are all wet, sit down by me,\" said {B}.",
        "\"Are you afraid of the storm?\" asked {B}.",
    ],
    [
        "{B} gave {A} {an} {col} blanket and some {food}.",
        "They ate {food} and told each other stories.",
        "They sang songs and were not afraid any more.",
    ],
    [
        "{later}, the storm was over.",
        "When the rain stopped, the sun came out.",
        "In the morning, the sky was clear again.",
    ],
    [
        "{B} showed {A} the way home.",
        "They walked home together, hand in hand.",
        "They saw a rainbow over {otherplace}.",
    ],
    THANKS,
]

SEED: list[Beat] = [
    [
        "{He} found a tiny seed {atplace}.",
        "{B} the {bkind} gave {A} a tiny seed.",
        "{His} grandfather gave {him} a small brown seed.",
    ],
    [
        "{A} planted the seed {atplace}.",
        "{He} put the seed into the soft ground.",
        "{He} planted it next to the fence and gave it some water.",
    ],
    [
        "Every day {he} gave it water, but nothing happened.",
        "{He} waited and waited, but nothing came up.",
        "Days went by, and {he} saw only brown earth.",
    ],
    [
        "\"It will never grow,\" said {A}.",
        "{A} was {bad}.",
        "\"Why does it not grow?\" asked {A}.",
    ],
    [
        "\"You must wait a little longer,\" said {B} the {bkind}.",
        "\"Give it time and water,\" said {B}, {an} {badj} {bkind}.",
        "{B} the {bkind} told {him} to be patient.",
    ],
    [
        "So {A} waited and sang to the seed every evening.",
        "{A} did not give up.",
        "{A} took good care of it day after day.",
    ],
    [
        "{when}, a small green leaf came out of the ground.",
        "Then, after a warm rain, a green stem came up.",
        "{later}, {he} saw a little green leaf.",
    ],
    [
        "It grew and grew, and soon it was a big {seed}.",
        "It was the most beautiful {seed} in the whole village.",
        "In summer, it was a tall {seed}.",
    ],
    [
        "\"You were right, {B},\" said {A}.",
        "{A} was very {good} and showed it to {B}.",
        "\"Look how big it is!\" cried {A}.",
    ],
]

DARK: list[Beat] = [
    [
        "That night, {A} could not sleep.",
        "At night, {he} lay in bed and looked at the moon.",
        "When it was dark, {he} went to bed.",
    ],
    [
        "{sudden}, {he} heard {noise} outside.",
        "{sudden}, there was {noise} at the door.",
        "Then {he} heard {noise}.",
    ],
    [
        "{A} was afraid and hid under {his} blanket.",
        "{His} heart beat fast.",
        "\"Who is there?\" asked {A} in a small voice.",
    ],
    [
        "But {he} took {his} {col} lantern and opened the door.",
        "{He} took a deep breath and went outside.",
        "\"I must be brave,\" said {A} to {himself}.",
    ],
    [
        "It was only {B} the {bkind}.",
        "There stood {B}, {an} {badj} {bkind}, shaking with cold.",
        "{Hide} sat {an} {badj} {bkind} named {B}.",
    ],
    [
        "\"I am lost and I cannot find my home,\" said {B}.",
        "\"I am sorry, I did not want to scare you,\" said {B}.",
        "\"I am cold and alone,\" said {B}.",
    ],
    [
        "\"Come in and get warm,\" said {A}.",
        "{A} laughed and let {B} in.",
        "\"You can stay here tonight,\" said {A}.",
    ],
    [
        "They drank warm milk and ate some {food}.",
        "{A} gave {B} a blanket and some {food}.",
        "They talked until they fell asleep.",
    ],
    [
        "In the morning, {A} took {B} home.",
        "\"Thank you for your help,\" said {B}.",
        "{ending}, {A} was not afraid of the dark.",
    ],
]

BIRTHDAY: list[Beat] = [
    [
        "It was {his} birthday.",
        "Today was {his} birthday, but no one said a word.",
        "{when}, {A} had a birthday.",
    ],
    [
        "{He} went to {place}, but no one was there.",
        "{He} walked to {place} to see {B} the {bkind}, but {B} was not at home.",
        "{He} waited for {B} the {bkind}, but {bhe} did not come.",
    ],
    [
        "\"They forgot my birthday,\" said {A}.",
        "{A} felt {bad}.",
        "{He} walked home slowly with {his} head down.",
    ],
    [
        "{sudden}, the door opened.",
        "When {he} opened the door, the room was full of lights.",
        "But at home, {he} saw {an} {col} ribbon on the door.",
    ],
    [
        "\"Happy birthday, {A}!\" cried {B} and all the others.",
        "{B} and all {his} friends were there.",
        "\"Surprise!\" cried {B}.",
    ],
    [
        "There was a big cake and there were {food} for everyone.",
        "{B} had made {food} for everyone.",
        "They had {food} and a big cake.",
    ],
    [
        "{B} gave {him} {an} {col} {obj}.",
        "{His} present was {an} {col} {obj}.",
        "From {B} {he} got {an} {col} {obj}.",
    ],
    THANKS,
    ["", "They danced and sang until late at night.", "They played games all evening."],
]

FRIEND: list[Beat] = [
    [
        "But {A} had no friends and was often {bad}.",
        "{A} was new {atplace} and did not know anyone.",
        "{He} played alone every day.",
    ],
    [
        "{He} saw {B} the {bkind} with {an} {col} {obj}.",
        "{B} the {bkind} was playing with {an} {col} {obj} {atplace}.",
        "Near {otherplace}, {he} saw {an} {badj} {bkind} named {B}.",
    ],
    [
        "{A} wanted to say hello, but {he} was too shy.",
        "{A} hid behind a tree and watched.",
        "\"Maybe {B} does not like me,\" thought {A}.",
    ],
    [
        "Then the wind took the {obj} and blew it into the water.",
        "{sudden}, {B} fell down and hurt {bhis} [foot|knee|arm].",
        "Then {B} dropped the {obj}, and it rolled away.",
    ],
    [
        "{A} ran to help.",
        "{A} forgot that {he} was shy and ran to {B}.",
        "{A} jumped up and helped {B}.",
    ],
    [
        "\"Thank you, what is your name?\" asked {B}.",
        "\"That was kind of you,\" said {B}.",
        "\"Who are you?\" asked {B}.",
    ],
    [
        "\"My name is {A},\" said the {akind}.",
        "\"I am {A}, and I would like to play with you,\" said {A}.",
        "\"I am {A},\" said {A} quietly.",
    ],
    [
        "\"Let us play together,\" said {B}.",
        "\"Do you want to be my friend?\" asked {B}.",
        "\"You can play with me every day,\" said {B}.",
    ],
    [
        "They played with the {obj} until the sun went down.",
        "They ran and laughed all day.",
        "They shared some {food} and talked for a long time.",
    ],
]

SORRY: list[Beat] = [
    [
        "{B} the {bkind} had {an} {col} {obj}.",
        "{His} friend {B} the {bkind} had a new {col} {obj}.",
        "{B}, {an} {badj} {bkind}, had {an} {col} {obj}.",
    ],
    [
        "{A} wanted to have it too.",
        "{A} thought that it was the best {obj} in the world.",
        "\"May I hold your {obj}?\" asked {A}.",
    ],
    [
        "When {B} was away, {A} took the {obj} and played with it.",
        "{A} took the {obj} without asking.",
        "{A} held it, but it fell down and broke.",
    ],
    [
        "Then {B} came back and looked for the {obj}.",
        "\"Where is my {obj}?\" asked {B}.",
        "\"Do you know what happened to my {obj}?\" asked {B}.",
    ],
    [
        "\"I do not know,\" said {A}.",
        "{A} looked at the ground and said nothing.",
        "{A} ran away and hid {hide}.",
    ],
    [
        "But {A} felt {bad} and could not sleep.",
        "All day long, {A} felt {bad}.",
        "{He} could not eat {his} {food}, because {he} felt so {bad}.",
    ],
    [
        "{later}, {he} went to {B} and told {bhim} the truth.",
        "\"I took your {obj}, and I am sorry,\" said {A}.",
        "{later}, {A} gave the {obj} back and said sorry.",
    ],
    [
        "\"Thank you for telling me the truth,\" said {B}.",
        "{B} was not angry at all.",
        "\"I forgive you,\" said {B} with a smile.",
    ],
    [
        "Then they played with the {obj} together.",
        "They fixed the {obj} together.",
        "{A} gave {B} some {food}, and they were friends again.",
    ],
]

SICK: list[Beat] = [
    [
        "{B} the {bkind} did not come to play.",
        "{His} friend {B} the {bkind} was sick.",
        "{A} heard that {B} the {bkind} was ill.",
    ],
    [
        "\"I must visit {B},\" said {A}.",
        "{A} was worried about {B}.",
        "{A} wanted to do something nice for {B}.",
    ],
    [
        "So {he} cooked some soup and picked some flowers.",
        "{He} put some {food} into a basket.",
        "{He} looked for flowers near {place}.",
    ],
    [
        "The way was long, but {A} walked on.",
        "On the way, it began to rain, but {A} did not turn back.",
        "{He} went over {otherplace} and past the old mill.",
    ],
    [
        "{B} was in bed with {an} {col} blanket.",
        "{B} lay in bed and looked {bad}.",
        "\"Come in,\" said {B} in a weak voice.",
    ],
    [
        "{A} gave {B} the {food} and sat down by the bed.",
        "{A} read {bhim} a story and made some tea.",
        "\"I have brought you some {food},\" said {A}.",
    ],
    [
        "{B} smiled for the first time that day.",
        "\"I feel better already,\" said {B}.",
        "\"You are so kind,\" said {B}.",
    ],
    [
        "{later}, {B} was well again.",
        "A few days later, {B} could run and play again.",
        "{A} came back every day until {B} was well.",
    ],
]

TREASURE: list[Beat] = [
    [
        "{He} found {find} {hide}.",
        "{sudden}, {he} saw {find} {hide}.",
        "There, {hide}, lay {find}.",
    ],
    [
        "\"What is this?\" asked {A}.",
        "{He} had never seen anything like it.",
        "{A} put it into {his} pocket and went on.",
    ],
    [
        "{He} showed it to {B} the {bkind}.",
        "{later}, {he} met {B}, {an} {badj} {bkind}, and told {bhim} about it.",
        "{A} wanted to know whose it was, so {he} asked {B} the {bkind}.",
    ],
    [
        "\"It is not mine, but it may belong to someone {atplace},\" said {B}.",
        "\"Let us find out who lost it,\" said {B}.",
        "\"That is my [dear|lost|old] treasure!\" cried {B}.",
    ],
    [
        "\"I could keep it,\" thought {A}, but {he} knew that it was not right.",
        "{A} wanted to keep it, but {he} did the right thing.",
        "{A} did not think long and gave it away.",
    ],
    [
        "{B} was so {good} that {bhe} gave {A} {an} {col} {obj}.",
        "\"You are so kind, please take this {col} {obj},\" said {B}.",
        "As a thank you, {A} got {an} {col} {obj} and some {food}.",
    ],
    THANKS,
]

RACE: list[Beat] = [
    [
        "{B} the {bkind} said, \"I am faster than you.\"",
        "\"Let us run a race to {place},\" said {B} the {bkind}.",
        "There was a big race {atplace}.",
    ],
    [
        "\"I will try my best,\" said {A}.",
        "{A} was not fast, but {he} wanted to try.",
        "\"I am not afraid to lose,\" said {A}.",
    ],
    [
        "They stood side by side and waited for the bell.",
        "\"One, two, three, go!\" cried the owl.",
        "Everyone came to watch the race.",
    ],
    [
        "{B} ran very fast, and {A} was far behind.",
        "At first, {B} was in front.",
        "{A} ran as fast as {he} could.",
    ],
    [
        "But all at once {B} fell over a stone.",
        "But then {B} lost the way near {otherplace}.",
        "Then {B} fell into {trap}.",
    ],
    [
        "{A} could win now, but {he} stopped to help {B}.",
        "{A} did not run on, but gave {B} a hand.",
        "\"Are you hurt?\" asked {A} and helped {bhim} up.",
    ],
    [
        "They walked to the end together.",
        "Together they crossed the line, and both of them won.",
        "At the end, both got a prize of {food}.",
    ],
    [
        "\"You are the real winner,\" said {B}.",
        "Everyone clapped and cheered.",
        "\"A good friend is better than a prize,\" said {A}.",
    ],
]

PLOTS: dict[str, list[Beat]] = {
    "lost": LOST, "hungry": HUNGRY, "stuck": STUCK, "build": BUILD, "storm": STORM,
    "seed": SEED, "dark": DARK, "birthday": BIRTHDAY, "friend": FRIEND, "sorry": SORRY,
    "sick": SICK, "treasure": TREASURE, "race": RACE,
}

# What can be learned from each plot (a subset of the lessons that the judge knows).
PLOT_LESSONS: dict[str, list[str]] = {
    plot: [words.LESSONS[i] for i in picks]
    for plot, picks in {
        "lost": (1, 8), "hungry": (0, 1), "stuck": (1, 3, 4), "build": (1, 8), "storm": (1, 9, 6),
        "seed": (7,), "dark": (3,), "birthday": (1, 9), "friend": (6, 3), "sorry": (2, 5),
        "sick": (6, 1), "treasure": (2, 0), "race": (1, 4),
    }.items()
}

OPENINGS: list[Beat] = [OPEN_NAMED, OPEN_UNNAMED, NAMING, OPEN_DAY]
COMMON: list[Beat] = [TRAIT, START_DAY, WEATHER, CLOSE, LAST]


def all_templates() -> list[str]:
    """Every sentence template once, in a fixed order."""
    beats = [*OPENINGS, *COMMON, *(beat for plot in PLOTS.values() for beat in plot)]
    return list(dict.fromkeys(t for beat in beats for t in beat if t))
