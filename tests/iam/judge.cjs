// Judge simulations of iam-simulate, a JSON list on standard input; print a list of verdicts.
const { runSimulation } = require('@cloud-copilot/iam-simulate')
const { readFileSync } = require('node:fs')

async function verdict(simulation) {
  const said = await runSimulation(simulation, { simulationMode: 'Strict' })
  if (said.resultType !== 'single') throw new Error(JSON.stringify(said))
  const { analysis, ignoredContextKeys } = said.result
  if (ignoredContextKeys?.length) throw new Error(`unknown keys: ${ignoredContextKeys}`)
  const by = analysis.identityAnalysis.allowStatements.map((one) => one.statement.sid())
  return { result: said.overallResult, by }
}

Promise.all(JSON.parse(readFileSync(0, 'utf8')).map(verdict)).then((all) => console.log(JSON.stringify(all)))
