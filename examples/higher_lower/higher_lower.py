"""Cards: is the next one higher or lower? An environment in its own package."""

from agentrl import TextEnv


class HigherLower(TextEnv):
    """Five of thirteen cards, one by one. Right guesses pay 1/4; a wrong one ends the game."""

    system_prompt = "Is the next card higher or lower? Say higher or lower."
    isolation = "inline"  # it answers in microseconds; leave this out where a step may block

    def start(self, seed, options):
        self.cards = self.rng.sample(range(1, 14), 5)  # `rng` is seeded with the task's seed
        return str(self.cards[0])

    def step(self, action):
        shown, following = self.cards.pop(0), self.cards[0]
        right = action.strip() == ("higher" if following > shown else "lower")
        won = right and len(self.cards) == 1
        return str(following), right / 4, won or not right, False, {"success": won}


def random_player(env, rng):
    return rng.choice(["higher", "lower"])
