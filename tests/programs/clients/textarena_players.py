"""TextArena: two of its own agents play a game against each other."""

import json
import sys

import textarena as ta

base_url, model, api_key = sys.argv[1:]
episode = base_url.removesuffix("/v1")
agents = {}
for player in range(2):
    url = f"{episode}/as/player-{player}/v1"
    agents[player] = ta.agents.OpenAIAgent(model_name=model, base_url=url)
env = ta.make(env_id="TicTacToe-v0")
env.reset(num_players=2, seed=1)
done = False
moves = []
while not done:
    player, observation = env.get_observation()
    move = agents[player](observation)
    moves.append([player, move])
    done, _ = env.step(action=move)
rewards, _ = env.close()
scores = {f"player-{player}": reward for player, reward in rewards.items()}
print("\n" + json.dumps({"moves": moves, "segment_scores": scores}))
