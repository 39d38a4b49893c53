"""legal.py - a long agreement made of clauses of our own, for make-texts: numbered sections, definitions, cross references.

Wording is fixed except for what stands in braces: {a|b|c} is one of several, {@key} the number of the section that bears
the key, {#lo-hi} a number. The same random generator gives the same text.
"""
import re

TITLE = """FRAMEWORK AGREEMENT ON HOSTING, OPERATION AND MAINTENANCE

between

Lindholm District Heating Cooperative, registered under number 88-20417, 3 Boiler Yard, Lindholm ("the Customer")

and

Fennmark Systems Limited, registered under number 61-09385, 44 Old Rope Walk, Fennmark ("the Provider")

(each a "Party" and together the "Parties").

RECITALS

(A) The Customer supplies some 31,000 households with heat and reads their meters by radio.
(B) The Provider operates computing centres and has experience in running metering, billing and control systems for utilities.
(C) The Customer wishes to entrust the Provider with the operation of the systems named in the Schedules, without giving up its own responsibility towards its members and the supervisory authority.
(D) The Parties intend that responsibilities remain clear even where they share premises, networks and staff, and have agreed as follows.
"""

DEFINITIONS = [
    ("Affected System", "any System or part of a System whose function is impaired by an Incident, including Systems that depend on it"),
    ("Business Day", "a day other than a Saturday, a Sunday or a public holiday at the seat of the Customer"),
    ("Change", "any addition to, modification of or removal from a System, its configuration or its documentation, other than the routine work listed in Schedule 2"),
    ("Charges", "the amounts payable under section {@charges} and Schedule 3, exclusive of value added tax"),
    ("Confidential Information", "information of either Party that is marked as confidential or whose confidential nature is evident from its content or from the circumstances, whatever its form, but not information excluded by section {@confidential_exceptions}"),
    ("Control Room", "the permanently staffed room of the Customer at Boiler Yard from which the network is controlled"),
    ("Customer Data", "all data entered, measured, stored or derived in the Systems by or for the Customer, including meter readings, and every copy of them"),
    ("Commencement Date", "the first day of the month following the date on which the last Party has signed"),
    ("Emergency", "a situation in which the supply of heat to more than {#300-600} households, or the safety of persons, is in danger"),
    ("Exit Plan", "the plan described in section {@exit_plan}, as amended from time to time"),
    ("Good Industry Practice", "the degree of skill, care and foresight that may reasonably be expected of an experienced operator of comparable systems under comparable circumstances"),
    ("Heating Season", "the period from 1 October to 30 April"),
    ("Incident", "an event that is not part of the normal operation of a System and that interrupts it or reduces its quality, whether or not its cause is known"),
    ("Key Person", "an individual named in Schedule 5 on whose experience the Customer relies"),
    ("Maintenance Window", "the time from 22:00 on a Tuesday to 4:00 on the Wednesday following, outside the Heating Season also the same hours on Thursdays and Fridays"),
    ("Personal Data", "Customer Data relating to an identified or identifiable natural person"),
    ("Response Time", "the time between the report of an Incident and the moment at which a qualified employee of the Provider begins to work on it"),
    ("Restoration Time", "the time between the report of an Incident and the moment at which the Affected System is again available for its intended use, be it by way of a workaround"),
    ("Service Credit", "a reduction of the Charges under section {@credits}"),
    ("Services", "the services described in the Schedules, and all incidental services without which they could not properly be rendered"),
    ("Subcontractor", "any third party to whom the Provider entrusts the whole or a part of the Services, at whatever tier"),
    ("System", "each of the systems described in Schedule 1, consisting of hardware, software and connections"),
    ("Term", "the period from the Commencement Date until this Agreement ends, for whatever reason, and, where section {@after_end} so provides, the period thereafter"),
    ("Third-Party Software", "software in which neither Party holds the rights that would be needed to modify it"),
]

# (article, [(key or None, text)])
ARTICLES = [
    ("Scope and order of precedence", [
        ("scope", "The Provider shall render the Services from the Commencement Date in accordance with this Agreement, the law and Good Industry Practice."),
        (None, "The Schedules form part of this Agreement. If a Schedule contradicts the body of this Agreement, the body prevails, unless the Schedule names the section from which it departs and states that it does so."),
        (None, "General terms and conditions of either Party do not apply, even if an order, a delivery note or an invoice refers to them and nobody objects."),
        ("exclusivity", "The Customer does not grant exclusivity. It may at any time render services of the same kind itself or obtain them from others; the Provider shall cooperate with such others as it would with a department of the Customer, and may charge for the additional effort under section {@effort} only if it has announced that effort beforehand."),
        (None, "Illustrations introduced by \"in particular\", \"including\" or similar words do not limit the generality of what precedes them."),
    ]),
    ("Responsibilities of the Provider", [
        ("staff", "The Provider shall employ a sufficient number of persons who are trained, reliable and, where Schedule 4 so requires, vetted. On the Customer's reasoned request it shall replace within {#10-20} Business Days a person whose conduct gives rise to justified doubt."),
        ("key_persons", "A Key Person may be withdrawn only for reasons beyond the control of the Provider, or with the consent of the Customer, which shall not be withheld unreasonably if a successor of equal qualification has worked beside the Key Person for at least {#20-40} Business Days."),
        ("documentation", "The Provider shall keep the documentation of every System complete and current, so that a qualified third party could operate the System on its basis alone. It hands over a copy on the last Business Day of each quarter."),
        ("monitoring", "Each System is monitored around the clock. The Provider shall not switch off or mute an alarm for more than {#20-50} minutes without entering in the operations log who has done so, why, and until when."),
        (None, "The Provider informs the Customer without undue delay of every circumstance from which a prudent operator would conclude that an obligation under this Agreement may not be met on time. The duty to inform exists irrespective of who is to blame; information given under this section is no admission."),
        ("control_room", "Instructions of the Control Room in an Emergency are binding on the Provider, even if they depart from this Agreement. The Provider may ask for their confirmation in text form afterwards, and is not liable for the consequences of having obeyed them."),
    ]),
    ("Cooperation of the Customer", [
        ("cooperation", "The Customer shall perform the acts of cooperation listed in Schedule 2 at its own cost. Further cooperation may be demanded only to the extent that the Services cannot reasonably be rendered without it."),
        (None, "If an act of cooperation is not performed, or not in time, the Provider shall say so in text form within {#4-8} Business Days, naming the act and the consequences that it expects. Dates are then extended by the duration of the hindrance. A Provider that has remained silent cannot rely on the omission later."),
        ("access", "The Customer grants access to its premises between 6:00 and 20:00, and in an Emergency at any time, to persons who identify themselves and observe the house rules. The rules are handed over at the Commencement Date; amendments are notified {#10-20} days in advance."),
        (None, "The Customer remains responsible for the accuracy of the tariffs and of the addresses that it enters into the billing system, and for the decision to cut off a member from supply, which is never to be taken by a machine alone."),
    ]),
    ("Service levels", [
        ("levels", "The Services shall meet the levels stated in Schedule 1. Levels are measured by the monitoring system of the Provider, to whose raw data the Customer has access at all times; where its records are incomplete for more than {#30-90} minutes in a month, the records of the Customer are decisive for the time in question."),
        ("availability", "The availability of a System in a calendar month is the quotient of the minutes during which it was available and all minutes of the month, less the minutes of agreed Maintenance Windows. A System is not available if its function according to Schedule 1 can be used by none, or by fewer than nine tenths, of those for whom it is intended."),
        ("priority", "Incidents have one of four priorities. Priority 1: the control of the network is impaired, or an Emergency exists. Priority 2: a System is down, or data are being lost. Priority 3: a function is down but can be circumvented. Priority 4: all others. The reporter proposes the priority; the Control Room decides in case of doubt, and its decision may be reviewed afterwards in the monthly meeting under section {@meeting}."),
        ("credits", "If a level is missed, the Charges for the System concerned are reduced for that month by the percentage stated in Schedule 3, in all by not more than {#20-35} per cent. Service Credits are deducted from the next invoice without being asked for. They are a reduction of price, not a penalty, and leave claims for damages and the right under section {@cause} untouched; they are, however, set off against damages arising from the same event."),
        (None, "No Service Credit is due to the extent that a level was missed because of an act of the Customer contrary to section {@cooperation}, because of an instruction under section {@control_room}, or because of force majeure within the meaning of section {@force}."),
        ("repeat", "If the same level of the same System is missed in three months out of any six, the Provider shall submit, within {#10-15} Business Days and free of charge, an analysis of the causes and a plan of measures with dates. The plan binds the Provider once the Customer has approved it."),
    ]),
    ("Incidents", [
        ("report", "Incidents may be reported by telephone, through the portal or, for Priority 1, by the direct line between the Control Room and the Provider. A report is effective when it is received, whether or not it is acknowledged."),
        (None, "The Provider gives each Incident a number and a responsible person, and informs the reporter of progress at the intervals stated in Schedule 1. The responsible person changes only by an express handover, which is recorded."),
        ("restore", "Restoration takes precedence over the search for causes. Evidence that would be lost by restoration shall be secured first if that takes no longer than {#10-20} minutes, and always if there are signs of an attack."),
        ("postmortem", "For each Incident of Priority 1 or 2 the Provider delivers within {#5-10} Business Days a written account of what happened, minute by minute as far as is known; which assumption proved false; and which measures will make a repetition less likely. The account names functions, not persons."),
        (None, "Where the cause lies in Third-Party Software, the Provider reports it to the manufacturer, pursues the matter with the persistence that it would apply in its own affairs, and in the meantime maintains a workaround where one is feasible at reasonable cost."),
    ]),
    ("Changes", [
        ("change_request", "Either Party may request a Change. The Provider answers within {#8-15} Business Days with an offer that states effort, Charges, risks, the effect on service levels and a proposed date; for minor Changes, as defined in Schedule 2, an entry in the register suffices."),
        (None, "Until a Change has been agreed in text form the Provider continues to render the Services unaltered. It shall not make a Change on its own authority, save to avert a danger that leaves no time for consent; it then informs the Control Room at once and restores the former state on demand."),
        ("freeze", "During the Heating Season no Change is made to the control system between Friday noon and Monday morning, nor while the mean outdoor temperature of the preceding day was below minus {#8-14} degrees Celsius, except to remedy an Incident of Priority 1 or 2."),
        ("test", "Every Change is tested in an environment that corresponds to production in all respects relevant to the test, and can be reversed by a procedure that has itself been tested. The Customer may attend."),
        (None, "A Change required by law is announced by whichever Party first learns of the requirement. Its cost is borne by the Party to whose business in general the requirement is addressed; if it is addressed to both, each bears one half."),
    ]),
    ("Security and data protection", [
        ("security", "The Provider protects the Systems against unauthorised access, alteration and loss by measures that correspond to the state of the art and to the measures of Schedule 4. It shall have their effectiveness examined once a year by an independent expert and shall send the report to the Customer, complete but for such passages as would endanger third parties."),
        ("breach", "The Provider notifies the Customer of every actual or suspected breach of the security of Personal Data within {#12-24} hours of becoming aware of it, even if the facts are not yet established, and supplements the notification as they become so."),
        ("processing", "Personal Data are processed only on documented instructions of the Customer, within the countries named in Schedule 4, and by persons bound to secrecy. If the Provider holds an instruction to be unlawful it says so; it may suspend the execution of that instruction, but of no other, until the Customer has confirmed or altered it."),
        ("backup", "Customer Data are backed up daily, and those of the billing system hourly, to a second site at a distance of at least {#25-60} kilometres. Once in each half-year the Provider restores a backup chosen by the Customer, in the presence of the Customer if it so wishes, and records how long it took and what was missing."),
        ("deletion", "Customer Data are deleted when the Customer so demands and in any case {#60-120} days after the end of the Term, in such a way that they cannot be recovered with reasonable effort. Copies in backups that cannot be altered individually are deleted with the backup, and until then are not used for any purpose."),
        (None, "Meter readings with a resolution finer than one day shall not be analysed for any purpose other than billing, the detection of leaks, and the dimensioning of the network, and shall never be combined with data from other sources."),
    ]),
    ("Charges and payment", [
        ("charges", "For the Services the Customer pays the Charges stated in Schedule 3. They cover all expenses of the Provider, including travel, licences and energy, unless Schedule 3 says otherwise."),
        ("effort", "Services charged by effort are rendered only on order. The Provider records them by person, day and quarter of an hour; it informs the Customer when {#65-80} per cent of an estimate has been used, and bears whatever exceeds the estimate by more than one tenth, unless the excess is due to the Customer."),
        ("invoice", "Invoices are issued monthly in arrears and are due {#25-35} days after receipt. An invoice that does not show the Services by System and month, or lacks the Service Credits of the month before, is not due until it has been corrected."),
        (None, "If the Customer contests part of an invoice it pays the rest. Neither Party may suspend performance on account of a contested amount that is lower than two monthly Charges; section {@cause} remains unaffected."),
        ("indexation", "From the third year the Charges change once a year, on 1 April, by the percentage by which the index of wages in the services sector has changed between the two preceding years, but by not more than {#2-4} per cent. A change that has not been announced by the end of February lapses and cannot be made up for."),
    ]),
    ("Rights in results", [
        ("results", "Scripts, configurations, interfaces and documents that the Provider makes for the Customer under this Agreement belong to the Customer upon creation. Where the law does not allow rights to be transferred, the Customer receives an exclusive, perpetual, transferable right to use them in every manner."),
        (None, "Tools and knowledge that the Provider has brought with it or developed independently remain its own. To the extent that results cannot be used without them, the Customer may use, copy and modify them for the operation of the Systems, and have this done by others, also after the Term."),
        ("open_source", "Software under a licence that obliges the user to disclose source code may be combined with results only with prior consent in text form. The Provider keeps a list of all components with their versions and licences and delivers it with each release."),
        ("infringement", "If a third party asserts that a result infringes its rights, the Provider defends the Customer at its own cost, provided that it is informed without delay and that no claim is acknowledged without its consent. It then procures the right to continue, modifies the result, or, if neither is possible on reasonable terms, takes it back and refunds what was paid for it less {#15-25} per cent for each year of use."),
    ]),
    ("Confidentiality", [
        ("confidential", "Each Party keeps the Confidential Information of the other secret, uses it only for the purposes of this Agreement and discloses it only to those who must know it for such purposes and are bound accordingly."),
        ("confidential_exceptions", "The obligation does not extend to information that was known to the recipient, is or becomes public without a breach, is received lawfully from a third party, or is developed independently. Who relies on an exception must prove it."),
        (None, "Where a court or an authority demands disclosure, the recipient informs the other Party beforehand, as far as that is lawful, and discloses no more than it must. The Customer, being accountable to its members, may moreover present the total of the Charges and the service levels attained in its general meeting."),
        (None, "The obligations under this article continue for {#5-7} years after the Term, and for Personal Data and details of the security of the network without limit."),
    ]),
    ("Liability", [
        ("liability", "Either Party is liable without limit for intent and gross negligence, for injury to life, body or health, for a guarantee expressly given, and wherever the law does not permit a limitation."),
        ("cap", "Otherwise liability is limited to the foreseeable damage typical of this kind of agreement, for each contract year in all to {#110-160} per cent of the annual Charges, and for a breach of sections {@security} to {@backup} to twice that amount."),
        (None, "Loss of supply is damage within the meaning of section {@cap}; it comprises the refunds that the Customer owes to its members and the cost of mobile boilers, but not the loss of members."),
        (None, "For the loss of data the Provider is liable to the extent of the effort needed to restore them from backups made in accordance with section {@backup}, as if such backups had been made, unless they were to have been made by the Customer."),
        ("insurance", "The Provider maintains liability insurance of at least EUR {#4-8} million for each event and twice that amount for each year, and furnishes proof of it on the Commencement Date and every twelve months thereafter."),
    ]),
    ("Subcontractors", [
        ("subcontractors", "Subcontractors may be engaged only with prior consent in text form. For those named in Schedule 5 consent is deemed given for the services stated there. The Provider answers for the acts and omissions of its Subcontractors as for its own."),
        (None, "The Provider shall impose on each Subcontractor obligations that correspond to those under the articles on security, confidentiality and audit, and provide that the Customer may step into the contract, at its choice, if this Agreement ends for cause."),
        ("withdraw", "Consent may be withdrawn if it turns out that a Subcontractor has violated such obligations. The Provider has {#30-60} days to replace it; in the case of an intentional violation, the Subcontractor's access is closed at once."),
    ]),
    ("Audit and governance", [
        ("meeting", "The Parties meet once a month, alternately at Lindholm and at Fennmark. The Provider prepares a report on service levels, Incidents, Changes and risks and sends it {#3-5} Business Days in advance. The minutes are kept by the host and are deemed approved if nobody objects within ten days."),
        ("audit", "The Customer, its auditors and the authority supervising it may inspect premises, records and Systems as far as they concern the Services, upon {#5-10} Business Days' notice and, if there is reason to suspect a serious breach, without notice. Secrets of other customers of the Provider shall be respected."),
        ("findings", "Findings are classified by the auditor as serious, moderate or minor, and are remedied within 20, 60 and 180 days respectively. The cost of the audit is borne by the Customer, but by the Provider if there is a serious finding."),
        ("escalation", "Disputes are first discussed by the service managers, after {#8-12} Business Days without agreement by the managing directors, and then by a mediator appointed by the chamber of commerce. Until the mediation has failed, or two months have passed since it was requested, proceedings are inadmissible, except for interim relief."),
    ]),
    ("Force majeure", [
        ("force", "Neither Party is responsible for a failure to perform to the extent that it is caused by an event beyond its control that could neither have been foreseen nor averted with the care that could be expected of it, such as war, epidemic, flood, or a failure of the public grid that lasts for more than {#36-72} hours."),
        (None, "Low temperatures, strikes confined to the staff of the Provider or of a Subcontractor, attacks on information systems that Good Industry Practice would have repelled, and failures of the grid that are shorter are not force majeure."),
        (None, "The Party concerned informs the other at once of the event, its likely duration and the measures taken. If it lasts for more than {#45-90} days, the other Party may terminate this Agreement in whole or as regards the Services concerned; Charges are payable only for what has been rendered."),
    ]),
    ("Term, termination and exit", [
        ("term", "This Agreement begins on the Commencement Date and has a fixed term of {#4-6} years. It is then renewed by two years at a time, unless a Party gives notice of not less than nine months before the end of the current period. Notice that would make it end during the Heating Season takes effect on the following 31 May."),
        ("partial", "The Customer may terminate individual Services with a notice of six months as of the end of any quarter, from the second year onwards. The Charges for the remaining Services stay as they are, unless the Provider proves that a cost common to both cannot be avoided."),
        ("cause", "Either Party may terminate for cause without notice. Cause exists for the Customer in particular if a plan under section {@repeat} is not submitted or not carried out, if the availability of the control system falls below {#93-97} per cent in a month, if insurance under section {@insurance} lapses, or if section {@processing} is violated intentionally; and for the Provider if undisputed Charges of more than three months are outstanding {#20-30} days after a reminder that threatens termination."),
        ("exit_plan", "Within {#4-6} months of the Commencement Date the Provider delivers a plan by which each System can be handed over to the Customer or to a successor within ninety days and without an interruption longer than a Maintenance Window. The plan is updated yearly and after every Change that affects it, and is rehearsed once during the fixed term."),
        ("after_end", "On request the Provider continues to render the Services, or part of them, for up to twelve months after the end of this Agreement, on the terms in force at that time, regardless of the reason for which it has ended. A right of retention in Customer Data does not exist on any ground."),
        (None, "Upon the end of the Term each Party returns or destroys what it has received from the other. The articles on confidentiality, liability, rights in results and the final provisions survive."),
    ]),
    ("Final provisions", [
        ("writing", "Amendments require text form signed by both Parties, electronically or by hand; this applies also to a waiver of that requirement. Oral side agreements have not been made."),
        (None, "Neither Party may assign rights under this Agreement without consent, save for claims to payment. A change in the control of the Provider is notified within {#8-15} Business Days and entitles the Customer to terminate within six months with a notice of ninety days."),
        (None, "Should a provision be invalid or unenforceable, the others remain in force. The Parties shall replace it by a provision that is valid and as close as possible in its economic effect; the same holds for a gap."),
        ("law", "This Agreement is governed by the law of the seat of the Customer, without its conflict rules and without the convention on the international sale of goods. The courts at that seat have exclusive jurisdiction. The English version alone is binding."),
    ]),
]

SYSTEMS = [
    ("Radio reading of meters", "collects the readings of heat and water meters by radio every {#2-9} hours and checks them for plausibility"),
    ("Billing", "computes advance payments, yearly bills and corrections, and passes them on to the accounts of the Customer"),
    ("Network control", "shows pressures, temperatures and flows in the Control Room and transmits set points to {#180-320} substations"),
    ("Leak detection", "compares inflow and return of each district, listens to the sensors along the pipes and raises alarms"),
    ("Member portal", "lets members see their consumption, change their data and report faults"),
    ("Work orders", "plans the fitters' routes, keeps the stock of spare parts and records what was done on site"),
    ("Archive", "keeps contracts, drawings and correspondence for the periods prescribed by law, and proves that they have not been altered"),
    ("Weather and load forecast", "estimates the demand for heat over the next {#60-96} hours from forecasts of three weather services"),
    ("Telephony of the Control Room", "records the emergency line and the direct line under section {@report} and keeps the recordings for {#20-40} days"),
]

LEVEL_SENTENCES = [
    "The availability shall be at least 99.{#1-9} per cent in each month, and during the Heating Season at least 99.{#91-97} per cent.",
    "Restarts announced {#3-9} days in advance count as part of a Maintenance Window if they take less than {#10-40} minutes.",
    "The Response Time is {#10-30} minutes for Priority 1, {#1-2} hours for Priority 2, and the next Business Day otherwise.",
    "The Restoration Time is {#2-4} hours for Priority 1 and {#6-12} hours for Priority 2; for the other priorities a date is agreed case by case.",
    "Nine of ten requests are answered within {#300-900} milliseconds, measured at the boundary of the computing centre.",
    "Not more than {#5-30} minutes of data may be lost in an Incident; readings that can be requested again from the device do not count as lost.",
    "Progress is reported to the Control Room every {#15-45} minutes while an Incident of Priority 1 lasts, and twice a day for Priority 2.",
    "The System is rated for {#200-900} simultaneous users; above that number it may answer more slowly, but shall refuse nobody without a message.",
    "Twice a year, in {May|June} and in {September|October}, it is switched over to the second site for at least {#24-72} hours.",
    "Its clock does not deviate from legal time by more than {#50-200} milliseconds; a greater deviation is an Incident of Priority 3.",
    "Certificates and passwords of technical accounts are renewed every {#90-360} days without interruption.",
    "Capacity is extended by the Provider at its own cost as soon as {#70-85} per cent of it has been in use on five consecutive days.",
    "If it depends on another System that is not available, the priority is that of the other, and section {@credits} applies to the other alone.",
    "Operation without the public grid must be possible for {#24-72} hours, which shall be shown once a year under load.",
]

COOPERATION = [
    "to name a contact and a deputy for each System, and to report changes within {#3-8} Business Days",
    "to supply, by the {#10-20}th of each month, the tariffs that are to apply from the month following",
    "to keep the rooms at Boiler Yard between {#16-19} and {#24-27} degrees Celsius and to report a failure of the cooling at once",
    "to accept or to reject a Change within {#8-15} Business Days of its presentation, silence after a reminder being taken for rejection",
    "to take part, with at least {#2-4} persons, in the exercise in September in which the loss of a computing centre is rehearsed",
    "to have the power supply of the Control Room inspected every {#12-24} months and to hand over the record",
    "to inform the Provider of construction sites along its cables no later than {#15-40} days before work begins",
    "to license the Third-Party Software marked \"C\" in Schedule 1 and to pass on the manufacturer's notices within {#2-5} days",
]

ROUTINE = [
    "installing updates that the manufacturer has classified as security fixes, after a trial of {#2-7} days",
    "adding, blocking and removing users on the request of a person entitled to make it",
    "enlarging storage by up to {#10-25} per cent, and moving data between volumes of the same class",
    "replacing defective hardware by hardware of the same type, or of its successor if it is approved by the manufacturer",
    "adjusting the thresholds of alarms within the limits stated in the operations manual, with an entry in the log",
    "cleaning up temporary files that are older than {#14-60} days, save for those under a hold ordered by the Customer's counsel",
]

SECURITY = [
    "Administrative access is possible only from workstations set aside for that purpose, with two factors, and is recorded on a system that administrators cannot alter.",
    "The control network is separated from all others. Data leave it through a one-way gateway; commands enter it only from the Control Room.",
    "Media that have held Customer Data are destroyed by a certified firm, in the presence of a witness, within {#20-60} days of being taken out of service.",
    "Persons with administrative access are vetted before they begin and every {#3-5} years. Until the result is known they work under supervision.",
    "Vulnerabilities rated critical are closed within {#2-5} days, and high ones within {#10-20}; if that is impossible, the System is shielded and the Control Room informed.",
    "Keys for encryption are generated and kept in hardware modules at both sites. The Customer holds one of the three cards without which they cannot be exported.",
    "Personal Data are processed solely within the territory of the country of the Customer and of its northern neighbour.",
    "Remote maintenance by manufacturers takes place under the eyes of an employee of the Provider, who can interrupt it, and is recorded on video for {#30-90} days.",
]


class Agreement:
    def __init__(self, rng):
        self.rng = rng
        self.numbers = {}
        for a, (_, sections) in enumerate(ARTICLES, 2):
            for s, (key, _) in enumerate(sections, 1):
                if key:
                    self.numbers[key] = f"{a}.{s}"

    def fill(self, text):
        def choose(match):
            body = match.group(1)
            if body.startswith("@"):
                return self.numbers[body[1:]]
            if body.startswith("#"):
                low, high = body[1:].split("-")
                return str(self.rng.randint(int(low), int(high)))
            return self.rng.choice(body.split("|"))
        return re.sub(r"\{([^}]*)\}", choose, text)

    def body(self):
        yield TITLE
        yield "ARTICLE 1 - DEFINITIONS\n\n1.1 In this Agreement the following words have the meanings stated beside them, also in the plural:\n"
        for term, meaning in DEFINITIONS:
            yield f'"{term}" means {self.fill(meaning)}.\n'
        yield "1.2 Periods expressed in Business Days begin on the Business Day after the event that sets them in motion and end at 17:00 on the last of them.\n"
        for a, (title, sections) in enumerate(ARTICLES, 2):
            yield f"\nARTICLE {a} - {title.upper()}\n"
            for s, (_, text) in enumerate(sections, 1):
                yield f"{a}.{s} {self.fill(text)}\n"

    def schedules(self):
        yield "\nSCHEDULE 1 - SYSTEMS AND SERVICE LEVELS\n"
        for i, (name, what) in enumerate(SYSTEMS, 1):
            yield f"S1.{i} {name}. This System {self.fill(what)}."
            for s, text in enumerate(self.rng.sample(LEVEL_SENTENCES, 8)):
                yield f"  ({'abcdefgh'[s]}) {self.fill(text)}"
            yield ""
        yield "SCHEDULE 2 - COOPERATION AND ROUTINE WORK\n\nS2.1 Under section " + self.numbers["cooperation"] + " it falls to the Customer"
        for i, text in enumerate(COOPERATION):
            yield f"  ({'abcdefgh'[i]}) {self.fill(text)};"
        yield "\nS2.2 The following is routine work and not a Change:"
        for i, text in enumerate(ROUTINE):
            yield f"  ({'abcdefgh'[i]}) {self.fill(text)};"
        yield "\nSCHEDULE 3 - CHARGES AND SERVICE CREDITS\n"
        for i, (name, _) in enumerate(SYSTEMS, 1):
            r = self.rng
            yield (f"S3.{i} {name}: EUR {r.randint(18, 96) * 100:,}.00 a month; Service Credit for each "
                   f"{r.choice(('tenth', 'quarter', 'half'))} of a per cent below the availability of S1.{i}: {r.randint(2, 6)} per cent; "
                   f"for each Restoration Time exceeded: {r.randint(1, 4)} per cent.")
        yield f"S3.10 Effort under section {self.numbers['effort']}: EUR {self.rng.randint(92, 138)}.00 an hour; at night and on Sundays, half as much again.\n"
        yield "SCHEDULE 4 - SECURITY\n"
        for i, text in enumerate(SECURITY, 1):
            yield f"S4.{i} {self.fill(text)}"


def agreement(rng):
    text = Agreement(rng)
    return "\n".join(text.body()) + "\n".join(text.schedules()) + "\n"
