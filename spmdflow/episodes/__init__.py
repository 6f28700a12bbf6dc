"""Episodes: an agent program talks to an endpoint of the rank, which records every token.

An environment is `async def episode(row, *, base_url, model, api_key) -> float | dict | None`. It
speaks OpenAI's protocol to `http://127.0.0.1:PORT/episodes/ID/v1`, or to another address, and
returns the score. Sampled tokens are stored as token ids and log-probabilities; they are never
encoded again from text. A request that extends the recorded conversation continues the recorded
ids. docs/EPISODES.md lists the fields and the limits.

| file | thread or process | does |
|---|---|---|
| run | the compute lane | steps the generator with the requests of all episodes until they end |
| leader | the same, on a replica's first rank | running episodes, their requests and results |
| result | the compute lane | what an episode ends with |
| endpoint | a thread with an event loop | finds the episode of a request, has it answered |
| generation | the same | answers a request: has its replies generated and recorded; streams |
| pending | the same | replies that are being generated; how their tokens come back |
| named_model | the same | which model a request names, and its sampling settings |
| server_call | the same | replies of models on servers outside of the run |
| address | the compute lane | the port, URL and certificate of an endpoint |
| http | the endpoint's thread | HTTP over one connection, by h11: TLS, bodies, streams, limits |
| connections | the same | which connections are open, their owners, and which must be closed |
| ask | the same | the one internal form of requests and replies; what is refused |
| dialect | the same | what a dialect is; events of a stream |
| fields | the same | the dialect of chat completions and completions (OpenAI) |
| responses | the same | the dialect of Responses (OpenAI) |
| messages | the same | the dialect of Messages (Anthropic) |
| guided | the same | replies of a given form: JSON of a schema, calls |
| partial | the same | which text of a reply can be shown before it is complete |
| ids | the same | ids of replies and calls, equal in a repeated run |
| conversation | the same | messages -> token ids that extend the recorded ones; the chat template |
| message_form | the same | the form of messages that a chat template takes; marks of thoughts |
| reply | the same | sampled tokens -> message: thought, text and tool calls |
| recorder | the same | one episode's segments: ids, mask and log-probabilities |
| frozen | the compute lane | models with frozen weights: the reference, an earlier policy |
| model_set | all of them | what each model besides the policy needs |
| credit | the compute lane | rewards and weights of an episode's segments |
| parts | all of them | scores of parts of an episode, as an environment returns them |
| judging | the compute lane | which replica judges which group; what a judge gets |
| judgement | a worker process | what a judge returns |
| pool | the compute lane | worker processes: assignment of episodes, time limits, blame |
| child | a worker process | runs the coroutines of the environment; imports no torch |
| isolated | the same, with isolation=process | a process for each episode, with limits |
| episode_process | such a process and its parent | one episode: its limits, its messages, its run |
| process_memory | the parent | memory of processes and what they started |

A turn's seed comes from (run.seed, "episode", step, row, generation, turn): with a deterministic
environment an episode does not depend on the ranks or on the order in which requests arrive.

The ranks of a generation replica step their engines together: before each step the first rank
broadcasts which requests are new and which are aborted. Models with frozen weights belong to the
first rank alone, because nothing of their replies is trained. This package does not know batches or
the trainer.
"""
