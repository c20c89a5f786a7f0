// The checks of OpenAI's package for JavaScript; clients.py runs them in a folder whose node_modules has it.
import OpenAI from "openai";
const [address, model, prompt] = process.argv.slice(2), schema = JSON.parse(process.argv[5]);
const client = new OpenAI({baseURL: address + "/v1", apiKey: "none", maxRetries: 0});
const asked = {model, max_tokens: 12, temperature: 0.7, seed: 3}, said = [{role: "user", content: prompt}];
const text = async more => (await client.completions.create({...asked, prompt, ...more})).choices[0].text;
const format = {type: "json_schema", json_schema: {name: "person", schema, strict: true}};
const tools = [{type: "function", function: {name: "greet", parameters: schema}}];
const named = value => ["Tom", "Lily"].includes(JSON.parse(value).name);
const called = {...asked, max_tokens: 40, messages: said, tools, tool_choice: "required"};
const list = async chunks => { const all = []; for await (const one of chunks) all.push(one); return all; };
const checks = {
  "models": async () => (await client.models.list()).data[0].id === model,
  "text": () => text(),
  "same seed, same text": async () => await text() === await text(),
  "stream": async () => {
    const chunks = await list(await client.completions.create({...asked, prompt, stream: true}));
    return chunks.map(chunk => chunk.choices[0]?.text ?? "").join("") === await text();
  },
  "stop": async () => !(await text({stop: ["."], max_tokens: 60})).includes("."),
  "several choices": async () => (await client.completions.create({...asked, prompt, n: 3})).choices.length === 3,
  "log-probabilities": async () => (await client.completions.create({...asked, prompt, logprobs: 2})).choices[0].logprobs
    .token_logprobs.length === 12,
  "chat": async () => (await client.chat.completions.create({...asked, messages: said})).choices[0].message.content,
  "JSON schema": async () => named((await client.chat.completions.create({...asked, max_tokens: 40, messages: said,
    response_format: format})).choices[0].message.content),
  "usage of a stream": async () => (await list(await client.chat.completions.create({...asked, messages: said, stream: true,
    stream_options: {include_usage: true}}))).at(-1).usage.completion_tokens === 12,
  "tools": async () => named((await client.chat.completions.create(called)).choices[0].message.tool_calls[0].function.arguments),
  "tools, streamed": async () => named((await list(await client.chat.completions.create({...called, stream: true})))
    .flatMap(chunk => chunk.choices[0]?.delta.tool_calls ?? []).map(call => call.function.arguments ?? "").join("")),
  "prediction": async () => (await client.chat.completions.create({...asked, messages: said,
    prediction: {type: "content", content: " little girl named Lily."}})).choices[0].message.content,
  "responses": async () => (await client.responses.create({model, input: prompt, max_output_tokens: 16})).output_text,
  "responses, stream": async () => ["response.completed", "response.incomplete"].includes((await list(
    await client.responses.create({model, input: prompt, max_output_tokens: 16, stream: true}))).at(-1).type),
  "responses, continued": async () => {
    const first = await client.responses.create({model, input: prompt, max_output_tokens: 8});
    const second = await client.responses.create({model, input: "And then?", previous_response_id: first.id, max_output_tokens: 8});
    const ids = (await list(await client.responses.inputItems.list(second.id))).map(item => item.id);
    await client.responses.delete(first.id);
    return (await client.responses.retrieve(second.id)).output_text === second.output_text && ids.includes(first.output[0].id);
  },
  "embeddings": async () => (await client.embeddings.create({model, input: ["a", "b"], pooling: "mean"})).data.length === 2,
  "errors": () => text({model: "another"}).then(() => false, error => error.status === 404),
};
const told = {};
for (const name in checks) {
  try { told[name] = await checks[name]() ? "yes" : "wrong answer"; } catch (error) { told[name] = error.name; }
}
console.log(JSON.stringify(told));
