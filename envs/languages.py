"""Writes functions of whole numbers (`agentrl.envs.small_programs`) in several languages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl.envs.small_programs import (
    Branch,
    Expression,
    Fold,
    Function,
    Invocation,
    Operation,
    Value,
)


@dataclass(frozen=True, slots=True)
class Language:
    """How a program of several files is written and run. The program reads lines with the name of a
    function and its arguments, and prints what each returns.
    """

    interpreter: str
    """The program that must be there."""
    suffix: str
    write_function: Callable[[Function], str]
    write_module: Callable[[Sequence[str], Sequence[str]], str]
    """From its functions' texts and the modules that it needs."""
    write_main: Callable[[Mapping[str, Sequence[Function]]], str]
    """The program that calls the functions of these modules."""
    command: str = ""
    """What runs `main`; by default the interpreter. {modules} stands for the other files."""

    def run(self, modules: Sequence[str]) -> str:
        """The command that runs the program."""
        given = " ".join(f"-f {name}{self.suffix}" for name in modules)
        return (self.command or f"{self.interpreter} main{self.suffix}").format(modules=given)


def _infix(
    expression: Expression,
    variable: Callable[[str], str],
    call: Callable[[str, str], str],
    inside: bool = False,
) -> str:
    """An expression as text. `variable` and `call` write names and calls as the language does.
    `inside`: it is an operand, and needs brackets.
    """
    match expression:
        case int():
            return str(expression)
        case str():
            return variable(expression)
        case Invocation(name, argument):
            return call(name, _infix(argument, variable, call))
        case Operation(operator, left, right):
            sides = [_infix(side, variable, call, inside=True) for side in (left, right)]
            text = f"{sides[0]} {operator} {sides[1]}"
            return f"({text})" if inside else text


def _plain(expression: Expression, dollar: str = "") -> str:
    return _infix(
        expression, lambda name: f"{dollar}{name}", lambda name, value: f"{name}({value})"
    )


def _shell_expression(expression: Expression) -> str:
    text = _infix(expression, str, lambda name, value: f"$({name} $(({value})))")
    return f"$(({text}))"


def _python(function: Function) -> str:
    head = f"def {function.name}({', '.join(function.arguments)}):\n    # {function.says}\n"
    match function.body:
        case Value(result):
            return f"{head}    return {_plain(result)}\n"
        case Branch(left, right, then, other, greater):
            test = f"{left} {'>' if greater else '<'} {right}"
            return (
                f"{head}    if {test}:\n        return {_plain(then)}\n    return {_plain(other)}\n"
            )
        case Fold(first, last, start, operator, term, divisor):
            deep = " " * (12 if divisor else 8)
            only = f"        if i % {divisor} == 0:\n" if divisor else ""
            return (
                f"{head}    total = {start}\n    i = {_plain(first)}\n"
                f"    while i <= {_plain(last)}:\n{only}"
                f"{deep}total = total {operator} {_plain(term)}\n        i = i + 1\n"
                "    return total\n"
            )


def _sh(function: Function) -> str:
    given = " ".join(f"{name}=${at}" for at, name in enumerate(function.arguments, 1))
    head = f"{function.name}() {{\n  # {function.says}\n  {given}\n"
    match function.body:
        case Value(result):
            return f"{head}  echo {_shell_expression(result)}\n}}\n"
        case Branch(left, right, then, other, greater):
            test = f'[ "${left}" {"-gt" if greater else "-lt"} "${right}" ]'
            return (
                f"{head}  if {test}; then\n    echo {_shell_expression(then)}\n  else\n"
                f"    echo {_shell_expression(other)}\n  fi\n}}\n"
            )
        case Fold(first, last, start, operator, term, divisor):
            only = f"    if [ $((i % {divisor})) -eq 0 ]; then\n" if divisor else ""
            more = "    fi\n" if divisor else ""
            deep = " " * (6 if divisor else 4)
            return (
                f"{head}  total={start}\n  i={_shell_expression(first)}\n"
                f'  while [ "$i" -le {_shell_expression(last)} ]; do\n{only}'
                f"{deep}total=$((total {operator} {_shell_expression(term)}))\n{more}"
                '    i=$((i + 1))\n  done\n  echo "$total"\n}\n'
            )


def _braces(head: str, body: Value | Branch | Fold, dollar: str, declare: str) -> str:
    """A function of awk, JavaScript or Perl after its head, without the comment."""
    write = partial(_plain, dollar=dollar)
    i, total = f"{dollar}i", f"{dollar}total"
    match body:
        case Value(result):
            return f"{head}  return {write(result)};\n}}\n"
        case Branch(left, right, then, other, greater):
            test = f"{dollar}{left} {'>' if greater else '<'} {dollar}{right}"
            return f"{head}  if ({test}) {{\n    return {write(then)};\n  }}\n" + (
                f"  return {write(other)};\n}}\n"
            )
        case Fold(first, last, start, operator, term, divisor):
            only = f"    if ({i} % {dollar}{divisor} == 0)\n  " if divisor else ""
            block = ("{\n    ", "\n    }") if divisor else ("", "")
            line = f"    {total} = {total} {operator} {write(term)};"
            if divisor:
                line = f"{only.rstrip()} {block[0]}{line}{block[1]}"
            return (
                f"{head}  {declare}{total} = {start};\n  {declare}{i} = {write(first)};\n"
                f"  while ({i} <= {write(last)}) {{\n{line}\n    {i} = {i} + 1;\n  }}\n"
                f"  return {total};\n}}\n"
            )


def _awk(function: Function) -> str:
    given = ", ".join([*function.arguments, "  total", "i"])
    return _braces(
        f"function {function.name}({given}) {{\n  # {function.says}\n", function.body, "", ""
    )


def _javascript(function: Function) -> str:
    given = ", ".join(function.arguments)
    return _braces(
        f"function {function.name}({given}) {{\n  // {function.says}\n", function.body, "", "let "
    )


def _perl(function: Function) -> str:
    given = ", ".join(f"${name}" for name in function.arguments)
    head = f"sub {function.name} {{\n  # {function.says}\n  my ({given}) = @_;\n"
    return _braces(head, function.body, "$", "my ")


def _python_main(modules: Mapping[str, Sequence[Function]]) -> str:
    imports = "".join(f"from {module} import *\n" for module in modules)
    return (
        f"import sys\n{imports}\nfor line in sys.stdin:\n    name, *numbers = line.split()\n"
        "    print(globals()[name](*map(int, numbers)))\n"
    )


def _awk_main(modules: Mapping[str, Sequence[Function]]) -> str:
    written = ""
    for functions in modules.values():
        for function in functions:
            fields = ", ".join(f"${at}" for at in range(2, 2 + len(function.arguments)))
            written += f'$1 == "{function.name}" {{ print {function.name}({fields}) }}\n'
    return written


def _sh_main(modules: Mapping[str, Sequence[Function]]) -> str:
    sourced = "".join(f". ./{module}.sh\n" for module in modules)
    return f"{sourced}while read -r name numbers; do\n  $name $numbers\ndone\n"


def _perl_main(modules: Mapping[str, Sequence[Function]]) -> str:
    required = "".join(f'require "./{module}.pl";\n' for module in modules)
    return (
        f"{required}while (<STDIN>) {{\n  my ($name, @numbers) = split;\n"
        '  print &{\\&{$name}}(@numbers), "\\n";\n}\n'
    )


def _javascript_main(modules: Mapping[str, Sequence[Function]]) -> str:
    required = "".join(f"Object.assign(global, require('./{m}.js'));\n" for m in modules)
    return (
        f"{required}const lines = require('fs').readFileSync(0, 'utf8').trim().split('\\n');\n"
        "for (const line of lines) {\n  const [name, ...numbers] = line.split(' ');\n"
        "  console.log(String(global[name](...numbers.map(Number))));\n}\n"
    )


def _join_functions(functions: Sequence[str], _: Sequence[str] = ()) -> str:
    return "\n".join(functions)


def _python_module(functions: Sequence[str], needs: Sequence[str]) -> str:
    imports = "".join(f"from {module} import *\n" for module in needs)
    return "\n\n".join([*([imports] if imports else []), *functions])


def _perl_module(functions: Sequence[str], _: Sequence[str]) -> str:
    return "\n".join([*functions, "1;\n"])


def _javascript_module(functions: Sequence[str], _: Sequence[str]) -> str:
    names = ", ".join(text.split("(")[0].removeprefix("function ") for text in functions)
    return "\n".join([*functions, f"module.exports = {{ {names} }};\n"])


LANGUAGES: Mapping[str, Language] = {
    "python": Language("python3", ".py", _python, _python_module, _python_main),
    "sh": Language("sh", ".sh", _sh, _join_functions, _sh_main),
    "awk": Language("awk", ".awk", _awk, _join_functions, _awk_main, "awk {modules} -f main.awk"),
    "perl": Language("perl", ".pl", _perl, _perl_module, _perl_main),
    "javascript": Language("node", ".js", _javascript, _javascript_module, _javascript_main),
}
