// The checks of OpenAI's package for JavaScript; clients.py runs them in a folder whose node_modules has it.
import OpenAI from "openai";
const [address, model, prompt] = process.argv.slice(2), schema = JSON.parse(process.argv[5]);
const client = new OpenAI({baseURL: address + "/v1", apiKey: "none", maxRetries: 0});
const asked = {model, max_tokens: 12, temperature: 0.7, seed: 3}, said = [{role: "user", content: prompt}];
const text = async more => (await client.completions.create({...asked, prompt, ...more})).choices[0].text;
const format = {type: "json_schema", json_schema: {name: "person", schema, strict: true}};
const tools = [{type: "function", function: {name: "greet", parameters: schema}}];
const named = value => ["Tom", "Lily"].includes(JSON.parse(value).name);
const checks = {
  "models": async () => (await client.models.list()).data[0].id === model,
  "text": () => text(),
  "same seed, same text": async () => await text() === await text(),
  "stream": async () => {
    let all = "";
    const chunks = await client.completions.create({...asked, prompt, stream: true});
    for await (const chunk of chunks) all += chunk.choices[0]?.text ?? "";
    return all === await text();
  },
  "stop": async () => !(await text({stop: ["."], max_tokens: 60})).includes("."),
  "chat": async () => (await client.chat.completions.create({...asked, messages: said})).choices[0].message.content,
  "JSON schema": async () => named((await client.chat.completions.create({...asked, max_tokens: 40, messages: said,
    response_format: format})).choices[0].message.content),
  "tools": async () => named((await client.chat.completions.create({...asked, max_tokens: 40, messages: said, tools,
    tool_choice: "required"})).choices[0].message.tool_calls[0].function.arguments),
  "responses": async () => (await client.responses.create({model, input: prompt, max_output_tokens: 16})).output_text,
  "embeddings": async () => (await client.embeddings.create({model, input: ["a", "b"], pooling: "mean"})).data.length === 2,
  "errors": () => text({model: "another"}).then(() => false, error => error.status === 404),
};
const told = {};
for (const name in checks) {
  try { told[name] = await checks[name]() ? "yes" : "wrong answer"; } catch (error) { told[name] = error.name; }
}
console.log(JSON.stringify(told));
