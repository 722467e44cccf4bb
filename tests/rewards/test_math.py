"""The rule `math`: what is right and what is wrong, by a table of right answers, and of answers to
each.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.plugins import load
from agentrl.rewards.rules.final_answer import final_answer
from agentrl.rewards.rules.notation import number_in, plain
from agentrl.rewards.rules.units import unit_of, units_differ
from agentrl.scoring.build import build_reward
from agentrl.testing.rewards import trajectory
from tests.tiers import evenly

TABLE = [
    (
        1e-07,
        [
            r"\boxed{10^{-7}}",
            "1e-7",
            "10⁻⁷",
            "The answer is 10⁻⁷.",
            "$10^{-7}$",
            "0.0000001",
            "1×10⁻⁷",
        ],
        ["2e-7", r"\boxed{10^{-8}}", "0", r"\boxed{e-7}", r"\boxed{1e-8}"],
    ),
    (
        5e-05,
        [
            r"\boxed{0.00005}",
            r"\boxed{5\times 10^{-5}}",
            r"\boxed{5e-5}",
            r"\boxed{5E-05}",
            r"\boxed{\frac{1}{20000}}",
            "5·10⁻⁵",
            "5 * 10^-5",
            "5 x 10^-5",
            "It is 5 × 10^(-5).",
            "It is 5 × 10^{-5} metres",
            r"\boxed{5 \cdot 10^{-5}}",
        ],
        [
            r"\boxed{0.00006}",
            r"\boxed{5e-25}",
            r"\boxed{e-25}",
            r"\boxed{0.000051}",
            "5",
            "-5",
            r"\boxed{5e-5+1}",
        ],
    ),
    (
        6.02e23,
        [
            r"\boxed{6.02 \times 10^{23}}",
            "6.02e23",
            "602000000000000000000000",
            "6.02×10²³",
            r"\boxed{602 \times 10^{21}}",
            "6.02E+23",
        ],
        ["6.02", "6.03e23", "6.02e22", "23"],
    ),
    ("6.02e23", [r"\boxed{6.02e23}", r"\boxed{6.02\times10^{23}}"], []),
    ("5e-5", [r"\boxed{0.00005}", r"\boxed{5e-5}"], [r"\boxed{e-25}"]),
    ("1e-7", ["0.0000001"], []),
    (r"5\times 10^{-5}", ["5e-5", "0.00005"], []),
    ("1.5 × 10⁸", ["150000000", "1.5e8"], []),
    (1e22, [r"\boxed{10^{22}}"], []),
    (100000000000000000, [r"\boxed{10^{17}}", "1e17"], []),
    (12345678901234567, ["12345678901234567"], ["12345678901234568"]),
    (0.1, [r"\boxed{\frac{1}{10}}", "10%"], []),
    (
        42,
        [
            "42",
            "42.0",
            "$42$",
            "The answer is 42.",
            "**42**",
            r"\boxed{42}.",
            "= 42",
            "$$42$$",
            r"\[42\]",
            r"\(42\)",
            "x = 42",
            r"\boxed{x = 42}",
            "(42)",
        ],
        [
            "43",
            "",
            "no idea",
            r"\boxed{}",
            r"\boxed{42",
            "4.2",
            "421",
            r"\boxed{42x}",
            r"\boxed{42i}",
            r"\boxed{\{42\}}",
            r"\boxed{[42, 42]}",
        ],
    ),
    (
        -5,
        ["−5", r"\boxed{−5}", "The answer is −5", "–5", "－５", r"\boxed{-5}", "x = −5"],
        ["5", r"\boxed{5}", "−6"],
    ),
    (5, [r"\boxed{\$5}", "$5", "5 dollars"], ["−5", r"\boxed{−5}"]),
    ("-5", ["−5"], []),
    ("−5", ["-5"], []),
    (
        12,
        [
            "3×4 = 12",
            r"\boxed{3·4}",
            r"\boxed{3 × 4}",
            r"\boxed{24÷2}",
            "24/2",
            "\\boxed{24∕2}",
            r"\boxed{12\text{ cm}}",
            "12 cm",
            r"\boxed{12 \text{ square units}}",
        ],
        [],
    ),
    (
        "1/2",
        [
            "½",
            "0.5",
            r"\boxed{½}",
            "50%",
            r"\boxed{\frac12}",
            r"\boxed{\dfrac{1}{2}}",
            "1⁄2",
            r"\boxed{2/4}",
        ],
        ["1", "2", r"\boxed{1}"],
    ),
    (
        "3/2",
        [
            "1½",
            "1 1/2",
            r"\boxed{1 1/2}",
            r"\boxed{1\frac{1}{2}}",
            r"\boxed{1½}",
            "The answer is 1 1/2.",
            "1.5",
        ],
        ["1/2", r"\boxed{11/2}", "1", "2"],
    ),
    ("-3/2", ["−1½", "-1 1/2", r"\boxed{-1\frac{1}{2}}"], []),
    (r"1\frac{1}{2}", ["3/2"], []),
    ("1 1/2", ["1.5"], []),
    (
        1234,
        [
            "1,234",
            "1 234",
            "1\u2009234",
            "1\u202f234",
            "1{,}234",
            r"\boxed{1\,234}",
            r"\boxed{1 234}",
            r"\boxed{1{,}234}",
            "1'234",
            r"\$1,234",
        ],
        ["235", "1.234", "234", r"\boxed{1, 234}"],
    ),
    ("1,234", ["1234"], []),
    ("1 234 567", ["1234567", "1,234,567"], []),
    (1234567.5, ["1,234,567.5", "1 234 567.5"], []),
    ("x^2", ["x²", r"\boxed{x²}", r"\boxed{x^2}", r"\boxed{x\cdot x}"], []),
    ("2π", ["2π", r"\boxed{2\pi}", "The answer is 2π.", r"2\pi"], []),
    (
        2,
        [],
        [
            "2π",
            "The answer is 2π",
            "The answer is 2√3.",
            r"The answer is 2\sqrt{3}",
            "2x",
            "It is 2^5",
        ],
    ),
    ("√2", [r"\boxed{\sqrt{2}}", "√2", "√(2)", "2^{1/2}", r"\boxed{1.414214}"], []),
    (r"2\sqrt{3}", ["2√3", r"\sqrt{12}", r"The answer is 2\sqrt{3}."], []),
    (
        7,
        [
            r"\boxed{7}\boxed{7}",
            r"\boxed{3}\boxed{7}",
            r"\boxed{\boxed{7}}",
            r"First \boxed{3}. Then, finally, \boxed{7}.",
            r"$\boxed{3}$ so the answer is $\boxed{7}$",
            r"\boxed{7} and \boxed{7}",
            r"\boxed{3+\boxed{4}}",
            r"growth of 50% is \boxed{7}",
            r"\fbox{7}",
            r"\boxed 7",
            r"\boxed{$7$}",
        ],
        [
            r"\boxed{7}\boxed{3}",
            r"\boxed{3}, \boxed{7}",
            r"\boxed{7} or \boxed{3}",
            r"\boxed{3} and \boxed{7}",
            r"\boxed{7} so \boxed{8}",
            r"\boxed{3,7}",
            r"\boxed{3 \text{ or } 7}",
            r"\boxed{3\text{ and }7}",
            "$3$ or $7$",
            r"\boxed{\pm 7}",
            r"\boxed{x=3, x=7}",
            r"\boxed{7} \%",
            r"\boxed{7\%}",
            "700%",
            r"\boxed{}",
            r"\boxed{7} \boxed{}",
            r"\boxed{\{1,2,3,4,5,6,7\}}",
            r"\boxed{x \ge 7}",
            r"\boxed{x \neq 8}",
            r"\boxed{\text{any of } 1, 7}",
            r"\boxed{5 = 7}",
            r"\boxed{x = 5 = 7}",
            r"\boxed{(3, 7)}",
            r"\boxed{\mathbb{R}}",
            r"\boxed{\frac{0}{0}}",
            r"\boxed{\frac{7}{0}}",
            r"\boxed{\infty}",
            r"\boxed{x}",
            r"\boxed{\text{the right answer}}",
            r"\boxed{7 \cdot x}",
            r"\boxed{f(7)}",
            "7%",
            r"\boxed{7",
            "1 or 2 or 3",
            r"\boxed{7}{\boxed{8}}",
            "7 8",
            r"\boxed{7\ 8}",
            r"\boxed{7;8}",
            r"\boxed{6<x<8}",
            r"\boxed{\approx 7.1}",
            r"\boxed{[6,8]}",
            r"\boxed{x \in \{7, 8\}}",
        ],
    ),
    ("12", [], [r"\boxed{1}\boxed{2}"]),
    (
        r"\{1, 2\}",
        [
            r"\boxed{1}, \boxed{2}",
            r"\boxed{1}\boxed{2}",
            r"\boxed{1} and \boxed{2}",
            r"\boxed{2,1}",
            r"\boxed{1, 2}",
            r"x=\boxed{1} or x = \boxed{2}",
            "$1$ and $2$",
            r"\boxed{1 \text{ and } 2}",
        ],
        [],
    ),
    (
        r"\{1,2\}",
        [],
        [
            r"\boxed{1}",
            r"\boxed{2}",
            r"\boxed{1,2,3}",
            r"\boxed{0}, \boxed{1}, \boxed{2}",
            r"\boxed{1,3}",
            r"\boxed{[1,2]}",
        ],
    ),
    (
        r"\frac{1}{2^{99}}",
        [r"\boxed{2^{-99}}", r"\boxed{\frac{1}{2^{99}}}"],
        [r"\boxed{\frac{1}{2^{98}}}", r"\boxed{0}", r"\boxed{2^{-100}}"],
    ),
    ("1/2^99", ["1/2^{99}"], ["1/2^98", "0", "0.0000000000"]),
    ("2^{-50}", [], ["0"]),
    ("10^{-9}", [], [r"\boxed{2\times 10^{-9}}", "2e-9"]),
    (
        0,
        ["0", "0.0", "-0", r"\boxed{0}", r"\boxed{\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}}"],
        ["1e-9", "0.0000001", r"\boxed{2^{-99}}", r"\boxed{e^{-100}}"],
    ),
    (r"\frac{x}{2^{99}}", [r"\boxed{2^{-99} x}"], [r"\boxed{\frac{x}{2^{98}}}"]),
    ("(0, 2^{-99})", [r"\boxed{(0, \frac{1}{2^{99}})}"], [r"\boxed{(0, 2^{-98})}"]),
    (r"\{0, 2^{-99}\}", [], [r"\boxed{\{0, 2^{-98}\}}"]),
    ("x = 2^{-99}", [], [r"\boxed{x = 2^{-98}}"]),
    ("(1, 2^{-99}, 3)", [], [r"\boxed{(1, 2^{-98}, 3)}"]),
    (
        "1/3",
        ["0.333333", "0.3333333333", r"\boxed{0.\overline{3}}"],
        ["0.33", "0.3333", "0.334", "0.3"],
    ),
    ("1/6", [r"\boxed{0.1\overline{6}}", "0.166667", "0.1666667"], []),
    ("1/12", ["0.083333"], []),
    ("1/300", [], ["0.0033"]),
    (r"\pi", ["3.141593", "3.14159265"], ["3.14", "3.1416", "22/7"]),
    (
        "[1,8)",
        [r"\boxed{[1,8)}", r"\boxed{[1, 8)}"],
        [r"\boxed{(1,8)}", r"\boxed{[1,8]}", r"\boxed{[1,9)}"],
    ),
    (
        r"(-\infty,2)\cup(3,\infty)",
        [r"\boxed{(-∞,2)∪(3,∞)}", r"\boxed{(-\infty,2) \cup (3, \infty)}"],
        [r"\boxed{(-\infty,2)}"],
    ),
    ("(1,2)", [r"\boxed{(1, 2)}", "(1,2)"], [r"\boxed{(2,1)}", r"\boxed{1}"]),
    ("(1,2,3)", [r"\boxed{(1,2,3)}"], [r"\boxed{(3,2,1)}", r"\boxed{(1,2)}"]),
    ("7%", ["7%", r"\boxed{7\%}", "0.07", "7 %", "７％"], ["7", "0.7%", "700%"]),
    (0.07, ["7%", r"\boxed{7\%}"], []),
    ("12 cm", ["12 cm", "12", r"\boxed{12\text{ cm}}", r"12\ \mathrm{cm}"], []),
    (90, [r"\boxed{90^\circ}", "90°", r"\boxed{90°}"], []),
    (
        "Monday",
        [r"\boxed{\text{Monday}}", r"\boxed{Monday}", "Monday", "monday.", r"\textbf{Monday}"],
        [r"\boxed{\text{Tuesday}}", r"\boxed{yadnoM}", "Tuesday"],
    ),
    (
        r"\text{Evelyn}",
        [r"\boxed{Evelyn}", r"\boxed{\text{Evelyn}}"],
        [r"\boxed{nylevE}", r"\boxed{\text{Eve}}"],
    ),
    (
        r"\text{(B)}",
        [r"\boxed{B}", r"\boxed{\text{(B)}}", "(B)"],
        [r"\boxed{C}", r"\boxed{\text{b or c}}"],
    ),
    ("2e-3", ["2e-3", "0.002", r"\boxed{-3+2e}"], []),
    ("1+2e", [r"\boxed{2e+1}", r"\boxed{1+2e}"], []),
    ("e^2", [r"\boxed{e^2}", r"\boxed{e \cdot e}"], []),
    ("0.002", [], [r"\boxed{-3 + 2 e}"]),
    ("2x+1", ["$1 + 2x$", r"\boxed{2x+1}", "2x + 1"], [r"\boxed{2x}", r"\boxed{2y+1}"]),
    ("y = 2x+1", [r"\boxed{y = 2x + 1}", r"\boxed{2x+1}"], []),
    ("y=2x+1", [], [r"\boxed{y=2x}", r"\boxed{0=0}", r"\boxed{y=y}"]),
    ("3+4i", [r"\boxed{3+4i}", r"\boxed{4i+3}"], [r"\boxed{3-4i}", r"\boxed{3}"]),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        [r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"],
        [r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}"],
    ),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"],
        [r"\begin{pmatrix}1&2\\4&3\end{pmatrix}", "1, 2, 3, 4"],
    ),
    # Right answers in which math-verify finds nothing where they stand alone, or in one notation
    (
        "No",
        ["No", "no.", r"\boxed{No}", r"The answer is $\text{No}$."],
        ["Yes", r"\boxed{N}", "Now"],
    ),
    ("DNE", ["DNE", r"\boxed{\text{DNE}}"], ["ENE", "5"]),
    ("East", [r"\(\text{East}\)", r"It is $\text{East}$."], [r"East or $\text{West}$"]),
    (r"\overline{AB}", [r"\overline{AB}"], [r"\overline{AC}"]),
    # Notations of which math-verify reads the 2 alone
    (
        2,
        ["**2**", "4**(1/2)", "4^(1/2)", "sqrt(4)", "It is 2.", "-(-2)", "x=2"],
        [
            "2**3",
            r"\boxed{2**3}",
            "2**-1",
            "2^-1",
            "It is 2^-1.",
            r"\boxed{2^-1}",
            "2pi",
            "2*pi",
            "It is 2 * pi.",
            "sqrt(2)",
            "sqrt 2",
            "minus 2",
            "It is negative 2.",
            "≤2",
            r"\boxed{\ge 2}",
            r"$\neq 2$",
            r"\boxed{>2}",
            r"\(\lt 2\)",
        ],
    ),
    (-2, ["minus 2", "It is negative 2.", r"negative \frac{4}{2}"], ["2", "5 minus 2"]),
    (8, ["2**3", r"\boxed{2 ** 3}"], ["2", "3"]),
    (r"2\pi", ["2pi", "2*pi", "2 * pi"], ["2", "pi"]),
    (r"\frac{1}{\sqrt{2}}", ["1/sqrt(2)", "2**(-1/2)", "sqrt(2)/2"], ["sqrt(2)"]),
    ("0.5", ["2^-1", "2**-1", r"\boxed{2^{-1}}"], ["2"]),
    (r"x \le 2", [r"\boxed{\le 2}", "x≤2"], [r"\boxed{\ge 2}", "2"]),
    (r"\infty", [r"\boxed{\infty}", "∞"], [r"\boxed{-\infty}", "5"]),
    (r"\emptyset", [r"\boxed{\emptyset}"], []),
    ("x<3", [r"\boxed{x<3}", r"\boxed{3 > x}"], [r"\boxed{x<4}", r"\boxed{x\le 3}"]),
    (1, [], ["True"]),
    ("1", [], ["True", r"\boxed{True}", r"\boxed{\text{true}}"]),
    (3628800, ["10!", r"\boxed{10!}"], []),
    (55, [r"\boxed{\sum_{n=1}^{10} n}"], []),
    ("262537412640768744", [], [r"\boxed{e^{\pi\sqrt{163}}}"]),
    ("５", ["5"], []),
    ("٣", ["3"], []),
    ("1 000 000", ["1000000", "10^6", "1e6"], []),
    (r"\{x = 1, x = 2\}", [r"\boxed{x=1, x=2}"], []),
    ("1, 2, 3", [r"\boxed{3, 2, 1}", r"\boxed{1},\boxed{2},\boxed{3}"], []),
    ("3", ["3"], []),
    ("x = 5", ["5", "x=5"], ["y = 5", "6"]),
    ("100,000", ["100000", "10^5", "1e5"], []),
    (r"$\frac{2}{3}$", [r"\boxed{\frac{2}{3}}", "2/3", "0.666667"], []),
    (r"\boxed{4}", ["4", r"\boxed{4}"], []),
    ("1:2", [r"\boxed{1:2}", r"\boxed{1/2}"], []),
    ("0.5", [".5", "0.50", "0.5"], []),
    (
        1267650600228229401496703205376,
        ["2^{100}", "1267650600228229401496703205376"],
        ["2^{99}", "1267650600228229401496703205377"],
    ),
    (1.2676506002282294e30, ["2^{100}"], []),
    # math-verify reads one side of each of these
    (
        7,
        [r"\boxed{|-7|}", r"\boxed{\left|-7\right|}"],
        [
            r"\boxed{7|8}",
            r"\boxed{8|7}",
            r"\boxed{8 \mid 7}",
            r"\boxed{7 \| 8}",
            r"\boxed{7\vert 8}",
            r"\boxed{7|8|9}",
            r"\boxed{7\\8}",
            r"\boxed{7?8}",
            r"\boxed{7 @ 8}",
            r"\boxed{7 # 8}",
            r"\boxed{7~8}",
            r"\boxed{\frac{14}{2} | 8}",
            "7|8",
            "$7|8$",
        ],
    ),
    (
        "1/3",
        [
            r"33.\overline{3}\%",
            r"\boxed{33.\overline{3}\%}",
            r"\boxed{33\frac{1}{3}\%}",
            r"\boxed{100/3\%}",
            r"\boxed{0.\dot{3}}",
            r"0.\overline3",
        ],
        [r"\boxed{\frac{1}{3}\%}", r"\boxed{33.\overline{3}}", r"33.\overline{4}\%"],
    ),
    (
        "0.002",
        [r"\boxed{2\mathrm{e}-3}", r"2\text{e}-3", r"2\,\mathrm{E}{-3}", "2e{-3}", "2E-03"],
        [r"\boxed{2\mathrm{e}-4}", r"\boxed{2\mathrm{e}3}"],
    ),
    ("e-3", [], [r"\boxed{2\mathrm{e}-3}"]),
    (
        9007199254740993,
        ["9007199254740993.0", r"\boxed{9007199254740993.00}"],
        ["9007199254740992.0"],
    ),
    ("12345678901234567.0", ["12345678901234567"], ["12345678901234568", "12345678901234566.0"]),
    (
        "12 cm",
        [
            "12cm",
            r"12\text{cm}",
            "12 centimetres",
            r"\boxed{12} cm",
            "The answer is 12 cm.",
            "12 cm long",
        ],
        [
            "12 m",
            "12 km",
            "12 inches",
            r"\boxed{12\text{ m}}",
            r"\boxed{12} mm",
            "12 cm^2",
            "0.12 m",
            "It is 12 m.",
        ],
    ),
    (
        r"12\text{ cm}^2",
        ["12", "12 cm²", "12 square centimeters", r"\boxed{12\,\mathrm{cm}^{2}}"],
        ["12 cm", r"\boxed{12\text{ cm}^3}", "12 m^2", "12 cubic centimeters"],
    ),
    ("60 mph", ["60", "60 miles per hour", r"\boxed{60 \text{ mi/h}}"], ["60 km/h", "60 miles"]),
    ("3 hours", ["3", "3 h", "3 hrs"], ["3 minutes", "3 days"]),
    (
        "$18",
        ["18", r"\$18", "18 dollars", "$18.00", r"\boxed{\$18}"],
        ["18 euros", "18 cents", "€18"],
    ),
    ("5 dollars", ["5", "$5", "5 dollars", r"\boxed{\$5}"], ["5 euros", "6 dollars"]),
    (r"\$5", ["5", "$5", "5 dollars"], ["5 euros"]),
    ("90°", ["90", "90 degrees", r"\boxed{90^\circ}"], ["90 radians"]),
    (
        "20 °C",
        ["20", "20 degrees Celsius", r"\boxed{20^\circ C}", "It is 20 °C."],
        ["20 °F", "20 degrees Fahrenheit"],
    ),
    ("5 apples", ["5", "5 apples"], []),
]
"""(the right answer, answers that are right, answers that are wrong)"""


def judge(answer: str, gold: object) -> float:
    """What the rule says, here in this process."""
    rule = build_reward(load("rewards", "math"), {})
    return float(rule.evaluate(rule.content(trajectory(answer, options={"answer": gold}))))


@pytest.mark.slow  # importing sympy takes seconds
@pytest.mark.parametrize(("gold", "right", "wrong"), evenly(TABLE, 60))
def test_an_answer_is_paid_exactly_where_it_equals_the_right_one(gold, right, wrong):
    assert {answer: judge(answer, gold) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: judge(answer, gold) for answer in wrong} == dict.fromkeys(wrong, 0.0)


def test_a_sign_before_a_currency_is_that_of_the_number():
    for gold, answer in ((-5, "The loss is -$5."), ("-$5", "-5"), ("-\\$5", "-$5"), (-5, "-€5")):
        assert judge(answer, gold) == 1.0, gold
    assert judge("-$5$", 5) == judge("-$5", 5) == judge("$5", -5) == 0.0


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        (True, "truth value"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        ({"x": 1}, "needs a number, or mathematics as text"),
        ([[1, 2]], "needs a number, or mathematics as text"),
        (["1", None], "no right answer"),
        ([], "no right answer"),
    ],
)
def test_a_right_answer_that_is_no_mathematics_is_an_error(gold, why):
    rule = build_reward(load("rewards", "math"), {})
    with pytest.raises(ConfigError, match=why):
        rule.check_task(trajectory("1", options={"answer": gold}).task)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("−5", "-5"),
        ("-$5 and −€.5", "$-5 and €-.5"),
        ("$3-$5, $a$-$5$", "$3-$5, $a$-$5$"),
        ("１２，３４５", "12,345"),
        ("٣", "3"),
        ("1½", r"\frac{3}{2}"),
        ("-1 1/2", r"-\frac{3}{2}"),
        ("6.02 × 10²³", "6.02".replace(".", "") + "0" * 21),
        (r"5\times 10^{-5}", "0.00005"),
        ("1\u2009234\u202f567", "1234567"),
        (r"1\,234", "1234"),
        ("10 200 300 words", "10 200 300 words"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        ("x²", "x^2"),
        ("2**3", "2^3"),
        ("**2**", "**2**"),
        ("2^-1", "2^{-1}"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("2*pi", r"2*\pi"),
        ("minus 2", "-2"),
        ("5 minus 2", "5 minus 2"),
        ("1e999999", "1e999999"),
    ],
)
def test_numbers_are_read_in_every_notation(written, read):
    assert plain(written) == read
    assert plain(plain(written)) == read


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("12", {}),
        ("12 in total", {}),
        ("$12$", {}),
        ("7%", {}),
        ("12 in", {"inch": 1}),
        ("€5", {"EUR": 1}),
        ("-$5", {"USD": 1}),
        ("$12\\text{ cm}$", {"cm": 1}),
        (r"9.8\ \mathrm{m\,s^{-2}}", {"m": 1, "s": -2}),
        ("9.8 meters per second squared", {"m": 1, "s": -2}),
        ("100 newton-meters", {"N": 1, "m": 1}),
        (r"12\pi \text{ cm}^2", {"cm": 2}),
        ("2e5 m", {"m": 1}),
        ("5 ml", {"mL": 1}),
    ],
)
def test_a_unit_is_known_by_each_of_its_names(text, unit):
    assert unit_of(text) == unit


FRAGMENTS = r"""
\boxed{ \boxed { } \frac{1}{2} \overline{3} \mathrm{e} \text{ cm} \% % $ \$ € ^ ^{ ² _ | \mid \\ ~
? . , e-3 .0 ** pi sqrt( minus negative \le \( \) \begin{
7 12 0.5 1/3 9007199254740993 m km/h per square dollars and ½ ٣ × 10⁻² −5
"""


@given(
    st.lists(st.sampled_from([" ", "\n", *FRAGMENTS.split()]), max_size=12).map("".join)
    | st.text(max_size=40)
)
@example("$\n7")
def test_no_text_is_beyond_the_readers(text):
    final_answer(text, several=False)
    assert units_differ(text, text) is False
    assert plain(plain(text)) is not None


def test_a_number_in_words_is_no_number():
    assert number_in("5 apples") is None
    assert number_in(" 1,234.50 ") == number_in("1234.5")
