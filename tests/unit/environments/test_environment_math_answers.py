"""Mathematical answers are compared: equal ones, wrong ones, and attacks on the comparison."""
# ruff: noqa: RUF001

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.environments import math_verifier
from telescope.environments.hendrycks_math.worked_out import is_worked_out
from telescope.environments.math_notation import normalize_answer
from telescope.environments.parsers import extract_stated_answer, verify_math_answer


@pytest.mark.parametrize(("answer", "expected"), [
    ("42", "42"), ("0.5", r"\frac{1}{2}"), (r"\dfrac12", r"\frac{1}{2}"), (r"$\sqrt{8}$", r"2\sqrt{2}"),
    ("2x+1", "1+2x"), (r"50\%", "0.5"), (r"\{1, 2\}", r"\{2, 1\}"), (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"1\,000\,000", "1,000,000"), (r"12\ 345", r"12,\!345"), ("120\u00b0", r"120^\circ"),
    ("June 20", r"\text{June 20}"), ("2516_{8}", "2516_8"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
])  # fmt: skip
def test_equal_answers_are_equal_however_they_are_written(answer, expected):
    assert verify_math_answer(answer, expected, timeout_seconds=60.0)


@pytest.mark.parametrize("answer", [
    "", "4", "3 or 4", r"3 \text{ or } 4", "1,2,3,4", "3;4", "3 = 4", r"3 \neq 4", r"\{1,2,3\}", r"3} \boxed{4",
    "$3$ $4$", "x", r"\infty", "{3}{4}", r"\text{3}4", "\u0663", "\ud800", "3" * 2000, "{" * 500,
    "__import__('os').system('true')",
])  # fmt: skip
def test_other_texts_are_not_equal_to_the_answer(answer):
    assert not verify_math_answer(answer, "3", timeout_seconds=60.0)


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "95^{97^{99}}", r"\prod_{i=1}^{10^9} i"])
def test_an_endless_comparison_is_wrong_and_the_next_one_works(answer):
    assert verify_math_answer("0.5", r"\frac12", timeout_seconds=60.0)
    before = math_verifier._checker._child[0].pid
    assert not verify_math_answer(answer, "3", timeout_seconds=0.5)
    assert verify_math_answer("0.25", r"\frac14", timeout_seconds=60.0)
    assert math_verifier._checker._child[0].pid != before


RIGHT = r"""
4*x**10 - 2*x | 4x^{10} - 2x ;; 2*(x + 1)**(3/2) + C | 2(x+1)^{3/2} + C
−5 | -5 ;; \mathbf{5} | 5 ;; \(5\) | 5 ;; 90° | 90 ;; 90^\circ | 90 ;; 90 | 90^\circ ;; 90 degrees | 90
90\text{ degrees} | 90 ;; 1E3 | 1000 ;; 1e3 | 1000 ;; 1.5e-3 | 0.0015 ;; 2.5E+4 | 25000 ;; 1.5 × 10^3 | 1500
1.5 \cdot 10^3 | 1500 ;; 1.5*10^3 | 1500 ;; 1.5×10³ | 1500 ;; 10^{-3} | 0.001 ;; 42. | 42 ;; 42, | 42 ;; ½ | 0.5
2½ | 2.5 ;; 3¼ | 13/4 ;; √2 | \sqrt{2} ;; 2√3 | 2\sqrt{3} ;; √(x+1) | \sqrt{x+1} ;; √10 | \sqrt{10}
25 m/s | 25 ;; 25\text{ m/s} | 25 ;; 25\ \mathrm{m/s} | 25 ;; 25 | 25 m/s ;; 25 km/h | 25 ;; 25 cm² | 25
25\text{ cm}^2 | 25 ;; 25 cm^2 | 25 ;; 25 cm^3 | 25 ;; 5 apples | 5 ;; \text{5 apples} | 5
5 \text{ apples} | 5 ;; 0.\overline{3} | \frac{1}{3} ;; 0.\overline{3} | 1/3 ;; \frac{1}{3} | 0.\overline{3}
0.1\overline{6} | \frac16 ;; 1.\overline{27} | 14/11 ;; 0.\bar{3} | \frac13 ;; 1,000 | 1000 ;; 1{,}000 | 1000
1\,000 | 1000 ;; 1 000 | 1000 ;; 1 000 000 | 1000000 ;; 1,234,567.89 | 1234567.89 ;; \$18.90 | 18.90
$18.90 | 18.9 ;; 18.90 dollars | 18.9 ;; \$1,000 | 1000 ;; €5 | 5 ;; £5 | 5 ;; 50\% | 50 ;; 50% | 50
50% | 0.5 ;; 50\% | 50\% ;; 50 percent | 50% ;; \dfrac{1}{2} | \frac12 ;; \tfrac12 | 0.5 ;; \cfrac{1}{2} | 0.5
1/2 | 0.5 ;; -1/2 | -\frac{1}{2} ;; –1/2 | -0.5 ;; \frac{-1}{2} | -0.5 ;; -\frac{1}{2} | \frac{-1}{2}
1 1/2 | 1.5 ;; 1\frac{1}{2} | 1.5 ;; 1 \frac12 | 3/2 ;; -1\frac12 | -1.5 ;; x² | x^2 ;; x²+1 | 1+x^2
2π | 2\pi ;; π/2 | \frac{\pi}{2} ;; x ≤ 3 | x \le 3 ;; x ≥ 3 | x \geq 3 ;; x ≠ 3 | x \neq 3 ;; ∞ | \infty
(−∞, 3] | (-\infty,3] ;; (-∞, ∞) | (-\infty, \infty) ;; (0,1)∪(2,3) | (0,1)\cup(2,3) ;; [0, 1) | [0,1)
\left[0,1\right) | [0,1) ;; x \in [0,1) | [0,1) ;; \{1, 2, 3\} | \{3,2,1\} ;; {1, 2, 3} | \{1,2,3\}
1, 2, 3 | \{1,2,3\} ;; 1,2 | 2,1 ;; 1 and 2 | 1, 2 ;; 1 \text{ and } 2 | 1,2 ;; x=1, x=2 | 1,2
x = 1 \text{ or } x = 2 | 1, 2 ;; (1, 2) | (1,2) ;; \left(1, 2\right) | (1,2) ;; (1, \frac12) | (1, 0.5)
( 1 , 2 , 3 ) | (1,2,3) ;; x = 3 | 3 ;; x=3 | x = 3 ;; 3 | x=3 ;; f(x) = 2x+1 | 2x+1 ;; y = 2x + 1 | 2x+1
\boxed{5} | 5 ;; 5 | \boxed{5} ;; $5$ | 5 ;; $$5$$ | 5 ;; \[5\] | 5 ;; 5. | 5 ;; 5 . | 5 ;; \,5\, | 5 ;; 5\; | 5
~5 | 5 ;; **5** | 5 ;; `5` | 5 ;; "5" | 5 ;; 5! | 5! ;; +5 | 5 ;; .5 | 0.5 ;; -.5 | -1/2 ;; 5.0 | 5 ;; 5.00 | 5
05 | 5 ;; 007 | 7 ;; \text{5} | 5 ;; \mathrm{5} | 5 ;; \bf{5} | 5 ;; {\bf 5} | 5 ;; \boldsymbol{5} | 5
\textbf{5} | 5 ;; \mathbf{A} | A ;; \text{A} | A ;; (A) | A ;; \textbf{(A)} | A ;; (B) | \text{(B)}
\text{(C)} | C ;; \text{Yes} | yes ;; \text{true} | true ;; True | true ;; True | True ;; \text{Monday} | Monday
x^{2} | x^2 ;; x^2 + 2x + 1 | (x+1)^2 ;; \sqrt{8} | 2\sqrt2 ;; \frac{\sqrt{3}}{2} | \frac{1}{2}\sqrt{3}
\frac{1}{\sqrt{2}} | \frac{\sqrt2}{2} ;; 1+\sqrt{5} | \sqrt5+1 ;; \frac{1+\sqrt{5}}{2} | (1+√5)/2
\pm 2 | \pm2 ;; ± 2 | \pm 2 ;; ±2 | 2, -2 ;; 3 \pm \sqrt{2} | 3\pm√2 ;; 10:30 | 10:30 ;; 3:2 | 3:2
1:2 | 1 : 2 ;; \frac{3}{4}\pi | 3π/4 ;; e^{2} | e² ;; 2^{n-1} | 2^n / 2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} ;; 3 + 4i | 4i+3
\log_2 3 | \frac{\log 3}{\log 2} ;; \tan x | \frac{\sin x}{\cos x} ;; ５ | 5 ;; ５／２ | 5/2 ;; ⅓ | \frac13
⅔ | 2/3 ;; ¾ | 0.75 ;; −½ | -0.5 ;; x₁ | x_1 ;; α + β | \alpha + \beta ;; θ | \theta ;; 5 \text{ cm} | 5
5\,\text{cm} | 5 ;; 5 \mbox{ inches} | 5 ;; 5\text{cm} | 5\text{ cm} ;; 12\text{ units}^2 | 12
12 square units | 12 ;; 12\text{ square units} | 12 ;; 12 sq. cm | 12 ;; 3 hours | 3
3 hours 30 minutes | 3 hours 30 minutes ;; 25 miles per hour | 25 ;; 25 mph | 25 ;; 9.8 m/s^2 | 9.8
9.8 m/s² | 9.8 ;; 9.8\ \text{m/s}^2 | 9.8 ;; 5 \times 10^{-3} \text{ kg} | 0.005
6.02×10^23 | 6.02 \times 10^{23} ;; 6.02e23 | 6.02 \times 10^{23} ;; 1,2,3 | 1, 2, 3 ;; \approx 3.14 | 3.14
≈ 3.14 | 3.14 ;; 3.14\ldots | 3.14 ;; \frac{12}{16} | \frac34 ;; 11111_2 | 11111_{2}
n(n+1)/2 | \frac{n(n+1)}{2} ;; \varnothing | \emptyset ;; ∅ | \emptyset ;; (2, ∞) | (2,\infty)
\mathbb{R} | \mathbb{R} ;; ℝ | \mathbb{R} ;; \left\{1,2\right\} | \{1,2\} ;; \lbrace 1,2 \rbrace | \{1,2\}
27^{\circ} | 27 ;; 27^\circ\text{C} | 27 ;; 27 °C | 27 ;; 27^{\circ}C | 27 ;; -5 °C | -5 ;; 1st | 1 ;; 2nd | 2
72\text{ cents} | 72 ;; 72¢ | 72 ;; $72 | 72 ;; 72$ | 72 ;; \$72.50 | 72.5 ;; \text{\$72} | 72
1/3 | 0.\overline{3} ;; 12% | 12 ;; 12 \% | 12 ;; 0.12 | 12\% ;; one | one ;; \frac{a}{b} | a/b
a÷b | \frac{a}{b} ;; (x-1)(x+2) | x² + x − 2 ;; x^{1/2} | \sqrt{x} ;; |x| | \left|x\right|
\lvert x \rvert | |x| ;; \$5 million | 5 million ;; \Delta = 5 | 5 ;; 5 | \Delta = 5 ;; \Omega | \Omega
\ln 2 | ln(2) ;; sin(x) | \sin x ;; -5℃ | -5 ;; 41℉ | 41 ;; 5′ | 5' ;; 5″ | 5'' ;; no solution | No solutions
B. 2 | B ;; B) 2 | B ;; \textbf{(B)}\ 2 | B ;; (B) 2 | (B) ;; \text{B: } 2 | B ;; Option B | B ;; B | Option B
Choice (B) | B ;; 72 | Total: 72 ;; Result: 72 | 72 ;; Ans = 72 | 72 ;; The result is 72 | 72 ;; 72 | Total: $72$
speed = 5 | 5 ;; 5 | Speed: 5 ;; 72 | Clips = 72 ;; The answer is 72 | 72
\frac{5}{9} \approx 0.56 | \frac59 ;; x = 1/3 ≈ 0.33 | 1/3
3 pm | 3 ;; 25 seconds | 25 ;; 5 half | 5 half
10:30 a.m. | 10:30 AM ;; 3 pm | 3 p.m. ;; \{x | -1 < x < 2\} | \{x \mid -1<x<2\}
5元 | 5 ;; 5 元 | 5 ;; 5\text{ 元} | 5元 ;; 15 | 15元 ;; 12\ \text{平方厘米} | 12 ;; 60千米/时 | 60 ;; 5千克 | 5
5원 | 5 ;; 5 км | 5 ;; 5 м/с | 5 ;; 5 рублей | 5 ;; 5 миллиметров | 5 ;; 5 años | 5 ;; 5 mètres | 5 ;; 5万元 | 5万元
18 \mathrm{~km} / \mathrm{h} | 18 ;; 18 km/h | 18 \mathrm{~km} / \mathrm{h} ;; 2 | 2 \mathrm{~m} / \mathrm{s}^{2}
9.8 \mathrm{~m} \cdot \mathrm{s}^{-2} | 9.8 ;; y = -\frac{2}{3}x + \frac{5}{3} | 2x+3y-5=0
x > 5 | (5, \infty) ;; -2 \le x \le 7 | [-2,7] ;; 1\leqslant x\leqslant 3 | [1,3] ;; 3 ≥ x > 1 | (1, 3]
x \le 2 \text{ or } x \ge 3 | (-\infty, 2] \cup [3, \infty) ;; x < 1 或 x > 3 | (-∞,1)∪(3,+∞)
(2, +\infty) | \{x \mid x > 2\} ;; \{x : x>2\} | \{x|x>2\} ;; \{x \mid 1 \leq x < 3\} | [1,3) ;; x > 2 | \{x|x>2\}
\{ x \in \mathbb{R} \mid x > a\} | (a,\infty) ;; \left\{ x | x < 1 或 x > 3\right\} | (-\infty,1)\cup(3,\infty)
\frac{3+\sqrt5}{2}, \frac{3-\sqrt5}{2} | \frac{3 \pm \sqrt{5}}{2}
x = \frac{-1 \pm i\sqrt{3}}{2} | \frac{-1 + i \sqrt{3}}{2}, \frac{-1 - i \sqrt{3}}{2}
\binom{10}{3} | C_{10}^{3} ;; 120 | C_{10}^{3} ;; {n \choose k} | \binom{n}{k}
\arctan 2 | \tan^{-1}(2) ;; 60\,\% | 60\% ;; 33⅓% | \frac{100}{3}\% ;; 12.5\% | 12\frac12\%
72。 | 72 ;; 1、2 | 1, 2 ;; A, C, D | ACD ;; ACD | A,C,D ;; C, A | A, C
\binom{10}{3} = 120 | 120 ;; 5! = 120 | 120 ;; \cos A = \frac{3}{5} | \frac{3}{5} ;; |z| = 5 | 5
\frac{3}{5}+\frac{4}{5}i | \frac{3+4i}{5} ;; \frac{3-4i}{5} | \frac35-\frac45 i ;; 2i | 2i
12.5\% | 12.5 ;; 12.5 | 12.5% ;; 33\frac{1}{3}\% | 33\frac13 ;; \frac12 | \frac{1}{2}\% ;; 0.005% | 0.00005
\operatorname{tg} x | \tan x ;; \operatorname{arctg} 2 | \arctan(2) ;; \ctg x | \cot x ;; \frac{\lg 2}{\lg 3} | \log_3 2
1 + \lg 2 | \lg 20 ;; \operatorname{ln} 2 + 1 | 1+\ln 2 ;; i + 3 | 3+\mathrm{i} ;; 2 - 3\mathrm{i} | 2-3i
e^{2} | \mathrm{e}^2
x = k\pi + \frac{\pi}{4}, k\in\mathbb{Z} | \frac{\pi}{4}+k\pi ;; 2n+1, n \in \mathbb{N}^* | 2n+1 (n\in\mathbf{N}^{*})
Carol and Alice | \text{Alice and Carol} ;; \text{all  real numbers} | all real numbers
6.63 \times 10^{-34} | 6.626 \times 10^{-34} ;; 0.0000001 | 10^{-7} ;; 0.000033 | \frac{1}{30000}
0 | \sqrt2+\sqrt3-\sqrt{5+2\sqrt6} ;; 0 | \ln 6-\ln 2-\ln 3 ;; 0 | \sin^2(1)+\cos^2(1)-1
33\frac13\% | \frac{100}{3} ;; 0.5 | 0.5\% ;; 0.000015 | \frac{1}{65536} ;; 9^{9^9} | 9^{(9^9)}
2^{(2^{100})} | 2^{2^{100}} ;; 2k\pi,\ k\in\mathbb{Z} | 2k\pi ;; 2k\pi\,(k\in\mathbb{Z}) | 2k\pi
2n-1 | 2n-1 (n\in\mathbb{N}^*) ;; (k\pi, k\pi+1), k∈Z | (k\pi, 1+k\pi)\ (k \in \mathbb{Z})
prime numbers | prime number ;; even | even numbers ;; even numbers | even ;; mnpq | npqm ;; yxba | abxy
north east | northeast ;; Evelyn and John Smith | John Smith and Evelyn
"""
WRONG = r"""
\Omega | \omega ;; Ω | ω ;; \Gamma(2) | \gamma(2)
−5 | 5 ;; 5° | 6 ;; 1E3 | 1001 ;; 1E3 | 3 ;; 42.5 | 42 ;; ½ | 1/3 ;; 2½ | 1 ;; √2 | \sqrt{3} ;; √23 | \sqrt{2} 3
25 m/s | 26 ;; 25/3 | 25 ;; 25 m/s | 5 ;; 0.\overline{3} | 0.3 ;; 0.3 | \frac13 ;; 0.33 | \frac13 ;; 1,000 | 1
1,5 | 15 ;; (1,2) | (2,1) ;; (1,2) | [1,2] ;; [0,1) | (0,1) ;; [0,1] | (0,1) ;; 1, 2 | 1 ;; 1, 2, 3 | 1, 2
1,2 | 12 ;; 1 2 | 12 ;; 50\% | 5 ;; 50\% | 500 ;; \frac12 | 2 ;; x | 3 ;; 3 x | 3 ;; 3x | 3 ;; 3m | 5 ;; 5 | 3
3 or 4 | 3 ;; 3 \text{ or } 4 | 3 ;; 3 = 4 | 3 ;; 10:30 | 10 ;; 3:2 | 3 ;; 3:2 | 1.5000001 ;; -\frac12 | \frac12
x+1 | x-1 ;; \{1,2\} | \{1,2,3\} ;; 2^{10} | 20 ;; A | B ;; (A) | B ;; \text{A} | \text{B} ;; \text{Yes} | No
True | False ;; true | 1 ;; 1 | true ;; 1.\overline{27} | 1.27 ;; 10^3 | 103 ;; 10² | 102 ;; 3¼ | 31/4
2516_9 | 2516_8 ;; 1 1/2 | 11/2 ;; 25 apples | 52 ;; 12e | 12 ;; 2e | 2 ;; 7 \cdot 6 | 76 ;; 3 hours 30 minutes | 3
\frac{1}{3} | \frac{1}{30} ;; 5! | 5 ;; 5!! | 5 ;; 5..5 | 5 ;; \text{5 apples and 3 pears} | 5 ;; m | 5
\text{cm} | 5 ;; cm | 5 ;; $ | 5 ;; . | 5 ;; 0 | 5 ;; \ | 5 ;; x < 5 | 5 ;; x \ge 5 | 5 ;; \neq 5 | 5
not 5 | 5 ;; less than 5 | 5 ;; 5 \text{ or more} | 5 ;; 3 am | 3 pm ;; 3 a.m. | 3 PM ;; 5 half | 5 ;; 5 halves | 5
5 sixths | 5 ;; 3 quarters | 3 ;; 5 degrees below zero | 5 ;; 5 less | 5 ;; 9 negative | 9 ;; 5th root | 5
8 \cdot 70/8 \approx 70 | 70 ;; 1 \approx 2 | 2
5元 | 6 ;; 5万元 | 5 ;; 5千 | 5 ;; 3个半 | 3 ;; 5元3角 | 5 ;; 5만원 | 5 ;; 5 млн | 5 ;; 5 тысяч | 5 ;; 5 millions | 5
5 or 6个 | 5 ;; 1/\mathrm{e} | 1 ;; 2x+3y+5=0 | 2x+3y-5=0
5 | 5 thirds ;; 5 more | 5 ;; C. 2 | B ;; B. 2 or C. 3 | B ;; A) B | B ;; (A) 2, (B) 3 | A ;; Total: 73 | 72
x \ge 5 | (5, \infty) ;; x < 5 | (5,\infty) ;; \{x \mid x \ge 2\} | \{x \mid x > 2\} ;; 1<x<4 | \{x|1<x<3\}
x \le 1 \text{ or } x > 3 | (-\infty,1)\cup(3,\infty) ;; 1 < x < 3 | (-\infty,1)\cup(3,\infty)
\frac{3+\sqrt5}{2} | \frac{3 \pm \sqrt{5}}{2} ;; \frac{3\pm\sqrt5}{2} | \frac{3+\sqrt{5}}{2}
\frac{3\pm\sqrt7}{2} | \frac{3 \pm \sqrt{5}}{2} ;; \binom{10}{4} | C_{10}^{3} ;; C_{10}^{3} | 120
66\frac{1}{3}\% | 33\frac{1}{3}\% ;; \frac{1}{3}\% | 33\frac{1}{3}\% ;; A, C | ACD ;; ACD | A, C ;; A, B | B ;; AB | A
S = \binom{10}{3} | 120 ;; 120 = 5! | 120 ;; \sum_{n=1}^{10} n | 55 ;; x = 5!, x = 2 | 120, 2
\frac{3}{5}-\frac{4}{5}i | \frac{3+4i}{5} ;; 2i | 2 ;; 125\% | 12.5 ;; 1.25 | 12.5\% ;; \% | 5
10^{-20} | 6.63 \times 10^{-34} ;; 1.7 \times 10^{-19} | 1.6 \times 10^{-19} ;; 0.0000002 | 0.0000001
\lg 2 | \ln 2 ;; \operatorname{tg} x | \cot x ;; 3+\mathrm{i} | 3-\mathrm{i} ;; \mathrm{i} | 1 ;; \mathrm{e} | 1
k\pi + \frac{\pi}{3}, k\in\mathbb{Z} | \frac{\pi}{4}+k\pi, k\in\mathbb{Z} ;; k \in \mathbb{Z} | 5
Evelny | Evelyn ;; silent | \text{listen} ;; Mary | army
0.25% | 0.25 ;; 0.25\% | \frac14 ;; 0.99\% | 0.99 ;; \frac{1}{2}\% | \frac12 ;; x+5\% | x+5 ;; x+5 | x+5\%
k\pi, k\in\mathbb{N} | k\pi, k\in\mathbb{Z} ;; k\pi, k\in\mathbb{N} | k\pi, k\in\mathbb{N}^* ;; x>3, x∈N | x>3
1<x<5, x\in\mathbb{Z} | 1<x<5 ;; 1<x<5 | 1<x<5, x\in\mathbb{Z} ;; (1,2), x∈Z | (1,2) ;; (1,2) | (1,2), x∈Z
north east | east north ;; increasing then decreasing | decreasing then increasing ;; north east | north
John beats Mary | Mary beats John ;; Alice and Evelny | Evelyn and Alice ;; Alice or Carol | Alice and Carol
6.6 \times 10^{-34} | 10^{-20} ;; 6.9 \times 10^{-34} | 6.63 \times 10^{-34} ;; 0.00002 | \frac{1}{65536}
"""
"""Answers and what is expected, as in `answer | expected ;; answer | expected`."""


def pairs(table):
    return [pair.rsplit(" | ", 1) for line in table.strip().split("\n") for pair in line.split(" ;; ")]


def is_rewarded(answer, expected):
    return is_worked_out(answer, expected, "") and verify_math_answer(answer, expected, timeout_seconds=60.0)


@pytest.mark.parametrize(("answer", "expected"), pairs(RIGHT))
def test_a_right_answer_is_rewarded_in_every_notation(answer, expected):
    assert is_rewarded(answer, expected)


@pytest.mark.parametrize(("answer", "expected"), pairs(WRONG))
def test_no_notation_makes_a_wrong_answer_right(answer, expected):
    assert not is_rewarded(answer, expected)


@pytest.mark.parametrize("word", ["min ", "deg ", "sec/", "слово ", "元 "])
def test_a_unit_that_a_model_repeats_is_read_at_once(word):
    started_at = time.monotonic()
    normalize_answer(f"5 {word * 150}!")
    assert time.monotonic() - started_at < 1.0


STYLES = st.sampled_from([
    "{}", "${}$", r"\({}\)", r"\[{}\]", "{}.", " {} ", r"\mathbf{{{}}}", r"\text{{{}}}", r"\boxed{{{}}}", "**{}**",
    r"\,{}", r"{}\;", "{{{}}}", r"\boldsymbol{{{}}}", r"\displaystyle {}", "x = {}",
])  # fmt: skip
UNITS = st.sampled_from(["", "°", " m/s", " km", r"\text{ cm}^2", " cm²", r"\,\mathrm{kg}", " miles per hour", "."])
NUMBERS = st.one_of(
    st.integers(-10**6, 10**6).flatmap(
        lambda n: st.sampled_from(
            [(form, n) for form in (str(n), f"{n:,}", str(n).replace("-", "−"), f"{n}.0", f"{n}e0")]
        )
    ),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).flatmap(
        lambda f: st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"\dfrac{{{}}}{{{}}}"]).map(
            lambda form: (form.format(*f), rf"\frac{{{f[0]}}}{{{f[1]}}}")
        )
    ),
    st.tuples(st.integers(1, 99), st.integers(-9, 9)).flatmap(
        lambda f: st.sampled_from(["{}e{}", "{}E{}", r"{} \times 10^{{{}}}", "{} × 10^{}"]).map(
            lambda form: (form.format(*f), rf"{f[0]} \cdot 10^{{{f[1]}}}")
        )
    ),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(number=NUMBERS, unit=UNITS, styles=st.lists(STYLES, max_size=2, unique=True))
def test_style_and_unit_do_not_change_a_number(number, unit, styles):
    answer, value = number
    answer += unit
    for style in styles:
        answer = style.format(answer)
    assert is_rewarded(answer, str(value)), answer


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="0159.,-+/^_{}()[]$\\%°½²√π−×eEmsxa &", max_size=40))
def test_any_text_is_compared_without_an_error(text):
    is_rewarded(text, "5")
    is_rewarded("5", text)


@pytest.mark.parametrize(("text", "answer"), [
    ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"), ("#### 1,000\n", "1,000"), (r"\boxed{5}", "5"),
    ("Answer: 5", "5"), ("#### Step 2\nAnswer: 5", "5"), ("#### Final answer\nThe answer is 5.", "5"),
    (r"So the answer is \boxed{5}.", "5"), ("So the answer is 5.", "5"), ("The final answer is: $5$.", "$5$"),
    ("<answer> 5 </answer>", "5"), ("5", ""), ("48/2 = 24\n#### **72**\nDone.", "72"), ("#### B\n\nIt fits.", "B"),
    ("#### 1,072\n\nHope that helps!", "1,072"), ("#### 2. Sum\nAnswer: 5", "5"), ("##### 5\nAnswer: 6", "6"),
    ("<answer> #### 1072 </answer>", "1072"), ("<answer>\n#### 72\n</answer>\nDone.", "72"),
    ("<answer>The answer is 5.</answer>", "5"), ("The answer is 1072. Check: 1070+2.", "1072"),
    ("answer is 1072 because 1+1.", "1072"), ("The answer is 1072, since 1+1.", "1072"),
    ("The answer is 1072 (see above).", "1072"), ("The answer is **12**. So it is.", "12"),
    ("Answer:\n1072", "1072"), ("**Answer**\n1072", "1072"),
    ("## Final Answer\n\n$$\n72\n$$", "72"), ("answer = 72", "72"),
    ("The answer is 3 (mod 7)", "3 (mod 7)"), ("The answer is 5. Or 6.", "5. Or 6"), ("The answer is 5!", "5!"),
    ("The answer is 2.5.", "2.5"), ("The answer is Mrs. Smith.", "Mrs. Smith"),
    ("The answer is No. It is odd.", "No"),
    ("答案：72", "72"), ("所以答案是 $72$。", "$72$"), ("**答案：** 72，因为 48+24", "72"), ("Answer：72", "72"),
    ("答案：3，5", "3，5"),
    ("The answer is 5. The answer is 6.", "6"), ("An answer", ""), (r"x. **Answer:** \boxed{\frac12}", r"\frac12"),
])  # fmt: skip
def test_the_final_answer_of_a_solution_is_found(text, answer):
    assert extract_stated_answer(text) == answer
    if answer:
        assert verify_math_answer(answer, text, timeout_seconds=60.0)
