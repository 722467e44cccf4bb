"""The boards of MiniGrid and BabyAI in text: `env: gymnasium:minigrid:BabyAI-GoToObj-v0`.

The drawing shows the whole board, not the agent's narrow view. Each cell is two characters: a
letter for its content and one for its colour (MiniGrid's own drawing uses the same letter for green
and grey). Below it stands what the agent carries.
"""

from typing import Any

RULES = (
    "You are the arrow >> vv << or ^^, which shows where you face. left and right turn you;"
    " forward, pickup, drop and toggle are about the cell before you. ## is a wall, .. free. All"
    " else is two letters: K key, A ball, B box, G goal, V lava (deadly), F floor, D closed door, L"
    " locked door (toggle it with the key of its colour), O open door; then the colour: R red, G"
    " green, B blue, P purple, Y yellow, E grey."
)
_ARROWS = (">>", "vv", "<<", "^^")
_KINDS = {"floor": "F", "key": "K", "ball": "A", "box": "B", "goal": "G", "lava": "V"}
_COLOURS = {"red": "R", "green": "G", "blue": "B", "purple": "P", "yellow": "Y", "grey": "E"}


def action_words(env: Any) -> tuple[str, ...]:
    """The names of the actions, in the order of the action space; some environments use only the
    first few.
    """
    words = [action.name for action in env.unwrapped.actions]
    return tuple(words[: int(env.action_space.n)])


def describe(env: Any, observation: Any) -> str:
    """The mission, the board, and what the agent carries. Ignores the observation, which is the
    agent's view.
    """
    world = env.unwrapped
    rows = (
        " ".join(_cell(world, column, row) for column in range(world.width))
        for row in range(world.height)
    )
    held = f"a {world.carrying.color} {world.carrying.type}" if world.carrying else "nothing"
    return "\n".join([f"Mission: {world.mission}", *rows, f"You carry {held}."])


def _cell(world: Any, column: int, row: int) -> str:
    if (column, row) == tuple(world.agent_pos):
        return _ARROWS[world.agent_dir]
    thing = world.grid.get(column, row)
    if thing is None:
        return ".."
    if thing.type == "wall":
        return "##"
    if thing.type == "door":
        kind = "O" if thing.is_open else "L" if thing.is_locked else "D"
    else:
        kind = _KINDS[thing.type]
    return kind + _COLOURS[thing.color]
