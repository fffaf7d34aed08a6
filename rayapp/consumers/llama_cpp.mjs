// Open GGUF files in llama.cpp, and write what they make of prompts: the likeliest tokens.
//
//     node llama_cpp.mjs FOLDER/node_modules/node-llama-cpp request.json answer.json
//
// Both files are as answering.py has them. A chat comes as the text that its template makes.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [library, request, answer] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(path.join(library, "dist/index.js")));

async function answered(llama, asked) {
  const model = await llama.loadModel({ modelPath: asked.folder, gpuLayers: 0 });
  const threads = Math.max(1, os.availableParallelism() - 1); // it spins where others compute too
  const whole = { experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32" };
  const context = await model.createContext({ contextSize: asked.room, threads, flashAttention: false, ...whole });
  const sequence = context.getSequence();
  const written = [];
  for (const probe of asked.probes) {
    let ids = probe.ids;
    if (probe.text !== null) {
      ids = model.tokenize(probe.text, true);
      const begins = model.tokenizer && model.tokens.shouldPrependBosToken && model.tokens.bos;
      if (begins && ids[0] !== model.tokens.bos) ids = [model.tokens.bos, ...ids];
    }
    await sequence.clearHistory();
    const made = [];
    for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
      made.push(token);
      if (model.isEogToken(token) || made.length === asked.tokens) break;
    }
    written.push({ prompt: ids, ids: made });
  }
  const template = model.fileInfo.metadata?.tokenizer?.chat_template ?? null;
  await context.dispose();
  await model.dispose();
  return { written, gaps: [], template };
}

const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const answers = [];
for (const asked of JSON.parse(fs.readFileSync(request))) {
  try {
    answers.push(await answered(llama, asked));
  } catch (error) {
    answers.push({ error: String(error?.message ?? error) });
  }
  fs.writeFileSync(answer, JSON.stringify(answers));
}
process.exit(0);
